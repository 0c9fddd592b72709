"""Facts of a failure for its record and its diagnosis: known messages, and the chances of another start."""
