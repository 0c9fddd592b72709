"""A real Slurm of several hosts on one machine, for tests that must not be fooled by a mock.

Every host is a network, mount and UTS namespace; the daemons are Debian's own. Only the standard
library is used, so that the tool runs on a bare machine before anything is installed.
"""
