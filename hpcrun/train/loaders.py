"""What the processes of a data loader do before they read, whatever they read."""

import random

import numpy as np
import torch

from hpcrun.lifecycle.signals import ignore_in_helper_process


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
