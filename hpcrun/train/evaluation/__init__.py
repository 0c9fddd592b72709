"""Validation, early stopping and the best weights."""
