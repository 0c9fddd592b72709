"""The ranks without their training: placement, signals, agreement, watchdog, control groups."""
