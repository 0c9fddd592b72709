"""Tests of hpcrun.train; a package, so that ``python -m`` can start its programs."""
