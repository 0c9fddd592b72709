"""Send a run the signal that warns it before a time limit, to see it survive:
it is requeued after its end, and goes on.

Every rank gets SIGUSR2, or for a script the signal of job.warn_signal, on Slurm
and on the local cluster. The local cluster sends SIGCONT first and SIGKILL
after the grace time.
"""

import argparse

from hpcrun.cli.run_arguments import add_run, find_run
from hpcrun.launch import jobs
from hpcrun.printing import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_run(parser)


def run(arguments: argparse.Namespace) -> int:
    """Preempt the run's job."""
    say(f"hpcrun: {jobs.preempt(find_run(arguments))}")
    return 0
