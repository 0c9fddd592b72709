"""Parts of ``tools/bench/checkpoint.py``."""
