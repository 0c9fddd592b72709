"""Hangs, gradients that are not finite, and memory that runs out."""
