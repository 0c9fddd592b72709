"""Parts of `tools/chaos.py`: the disturbed run, the faults, the comparison with the undisturbed run."""
