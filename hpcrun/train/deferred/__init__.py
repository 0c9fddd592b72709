"""Deferred initialization: a model is built without memory, and its weights are computed after sharding."""
