"""The processes of a data loader: how many there are, and what they do before they read."""

import random
from collections.abc import Mapping

import numpy as np
import torch

from hpcrun.config import Config
from hpcrun.lifecycle.signals import ignore_in_helper_process

_MOST_WORKERS = 8


def start_worker(_worker: int) -> None:
    """For ``DataLoader(worker_init_fn=...)``: only ranks decide on signals, and threads are theirs."""
    ignore_in_helper_process()
    torch.set_num_threads(1)


def reseed(*numbers: int) -> None:
    """Seed the generators of this loader process from ``numbers``: where a sample stands.

    A worker's own stream of random numbers would depend on when it was started, which a resume changes.
    """
    mixed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    # Not torch.manual_seed, which goes through every kind of device: a worker uses none.
    torch.default_generator.manual_seed(mixed)


def worker_processes(config: Config, environ: Mapping[str, str]) -> int:
    """Loader processes for each rank: as ``data.workers`` says, or its cores but one, at most 8.

    The cores are those of ``job.cpus_per_task``, or those that Slurm has given the task; where neither is
    known there are no loader processes. The config goes first: it is the same after a restart elsewhere,
    and what samples draw at random depends on whether a loader process reads them.
    """
    if config.data.workers is not None:
        return config.data.workers
    given = environ.get("SLURM_CPUS_PER_TASK", "").strip()
    cores = config.job.cpus_per_task or (int(given) if given.isdecimal() else 1)
    return max(0, min(_MOST_WORKERS, cores - 1))
