"""Files, locks and logs that survive a crash and a full disk."""
