"""Do to a run what a preemption does, to see it survive: it saves, is requeued,
and goes on.

On the local cluster: SIGCONT and SIGTERM to every rank, the grace time, then a
requeue, as Slurm does. On Slurm: SIGUSR2 to the job's steps, the signal that
preemption and time limits send ahead.
"""

import argparse

from hpcrun.cli.runs import add_run, find_run
from hpcrun.launch import jobs
from hpcrun.printing import say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_run(parser)


def run(arguments: argparse.Namespace) -> int:
    """Preempt the run's job."""
    say(f"hpcrun: {jobs.preempt(find_run(arguments))}")
    return 0
