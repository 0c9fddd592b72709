"""Preparation of a model before the ranks share it."""
