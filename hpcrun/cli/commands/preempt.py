"""Send a run its time-limit warning signal, to test that it survives: it stops,
is requeued, and continues.

Every rank gets SIGUSR2, or for a script the signal of job.warn_signal, on Slurm
and on the local cluster. The local cluster sends SIGCONT first, and SIGKILL
after the grace time.
"""

import argparse

from hpcrun.cli.arguments import add_run, find_run
from hpcrun.printing import say
from hpcrun.slurm.launch import stopping


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run(parser)


def run(arguments: argparse.Namespace) -> int:
    """Preempt the run's job."""
    say(f"hpcrun: {stopping.preempt(find_run(arguments))}")
    return 0
