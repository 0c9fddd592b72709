"""The addresses, interfaces and ports of a node."""
