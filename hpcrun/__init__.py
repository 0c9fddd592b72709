"""hpcrun: PyTorch training on Slurm that ends with the weights it would have ended with undisturbed."""

__version__ = "0.1.0"
