"""Preparation and checks of a model before it is wrapped."""
