"""Notifications about a run (``watch.notify``): the message, its delivery, and the process that sends it."""
