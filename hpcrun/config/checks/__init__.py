"""Checks of a config beyond its schema, and the messages for what they find."""
