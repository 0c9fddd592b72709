"""Builders of a training's parts; session.py calls them in order."""
