"""Tests of the training room; a package, so that its programs can be started with ``python -m``."""
