"""The checks of ``gpu_acceptance.py``; each check runs in a separate process."""
