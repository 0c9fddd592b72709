"""The parts of ``gpu.py``; each part runs in a separate process."""
