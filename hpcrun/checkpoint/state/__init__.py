"""The state of a training as named tensors and plain data, and the way back."""
