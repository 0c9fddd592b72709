"""Health of a training: hangs, non-finite gradients, and running out of memory."""
