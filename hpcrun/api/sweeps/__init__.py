"""Sweeps: the configs of the elements, the sweep folder, the submission of all elements."""
