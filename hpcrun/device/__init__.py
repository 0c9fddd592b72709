"""The devices of a rank, of any vendor. No other package names CUDA: see ``accelerator`` and ``vendor``."""
