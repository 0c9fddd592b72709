"""Parts of `tools/chaos.py`: the run that is disturbed, the faults, the comparison with a calm run."""
