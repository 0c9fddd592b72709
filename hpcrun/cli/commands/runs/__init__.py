"""Commands that start, watch and end runs."""
