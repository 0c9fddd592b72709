"""The parts of ``gpu.py``, each of which runs in a process of its own."""
