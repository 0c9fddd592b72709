"""Any script at all: a program that knows nothing of hpcrun runs as one rank."""
