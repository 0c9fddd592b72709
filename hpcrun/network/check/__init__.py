"""Checks of the links between the nodes of a job: the schedule, the measurement and the findings."""
