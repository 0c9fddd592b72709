"""From a state to bytes that survive.

``store`` is the commit protocol on a file system and knows no torch; ``state`` says what of a
training is saved; ``writer`` brings the ranks together. Nothing is imported here, so that a command
which only looks at checkpoints does not pay for torch.
"""
