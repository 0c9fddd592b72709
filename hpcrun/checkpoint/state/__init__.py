"""The state of a training run as named tensors and plain data: capture and restore."""
