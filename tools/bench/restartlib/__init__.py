"""Parts of tools/bench/restart.py: the programs that are disturbed, and the measurement of a restart."""
