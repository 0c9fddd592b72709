"""Commands that compare many runs."""
