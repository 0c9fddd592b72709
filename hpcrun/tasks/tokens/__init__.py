"""Token shards: the format, their windows, and the command that makes them from text."""
