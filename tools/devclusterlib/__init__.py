"""A real Slurm with several hosts on one machine, for tests that need more than a mock.

Every host is a network, mount and UTS namespace; the daemons are Debian's programs. The package uses only
the standard library, so the tool runs on a bare machine before anything is installed.
"""
