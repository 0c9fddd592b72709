"""One add-on of each kind, each in a file of its own."""
