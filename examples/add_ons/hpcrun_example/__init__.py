"""One add-on of each kind, each in its own file."""
