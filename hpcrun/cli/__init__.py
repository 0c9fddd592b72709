"""The commands: each parses, calls the library, prints. None imports torch."""
