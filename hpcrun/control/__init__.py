"""The ranks' control path: CPU groups for decisions and small objects."""
