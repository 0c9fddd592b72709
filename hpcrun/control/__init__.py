"""Control groups: CPU process groups for decisions and small objects."""
