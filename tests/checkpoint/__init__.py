"""The checkpoint room, crashed at every system call."""
