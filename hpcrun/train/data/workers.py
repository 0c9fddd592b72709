"""Loader processes: their number, their setup and their random seeds."""

import random
from collections.abc import Mapping

import numpy as np
import torch

from hpcrun.config import Config
from hpcrun.ranks.signals import ignore_in_helper_process

_MOST_WORKERS = 8


def start_worker(_worker: int) -> None:
    """Set up a loader process: ignore the signals that ranks handle, and use one thread."""
    ignore_in_helper_process()
    torch.set_num_threads(1)


def reseed(*numbers: int) -> None:
    """Seed the generators of this loader process from ``numbers``: the position of a sample.

    A loader process's default generator depends on when the process was started, which a resume changes.
    """
    mixed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    # Not torch.manual_seed, which also seeds every kind of device; a loader process uses none.
    torch.default_generator.manual_seed(mixed)


def worker_processes(config: Config, environ: Mapping[str, str]) -> int:
    """Return the number of loader processes per rank: ``data.workers``, or the rank's cores minus one, max 8.

    The cores are ``job.cpus_per_task`` or those that Slurm has given the task; if both are unknown there are
    no loader processes. The config takes precedence because it is the same after a restart on another node:
    random numbers in samples depend on whether a loader process reads them.
    """
    if config.data.workers is not None:
        return config.data.workers
    given = environ.get("SLURM_CPUS_PER_TASK", "").strip()
    cores = config.job.cpus_per_task or (int(given) if given.isdecimal() else 1)
    return max(0, min(_MOST_WORKERS, cores - 1))
