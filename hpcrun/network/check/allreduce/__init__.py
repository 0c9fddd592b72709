"""The all-reduce of a network check, and the search for the node that makes it fail."""
