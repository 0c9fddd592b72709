"""Helpers of a rank next to the training: deadline, watchdog process, stacks, addresses."""
