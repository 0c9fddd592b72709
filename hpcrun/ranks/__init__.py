"""The ranks beside their training: placement, signals, agreement, watchdog, control groups."""
