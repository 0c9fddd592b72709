"""Random generators: their states in a checkpoint, blocks that leave them unchanged, and seeds.

The Task loop, ``hpcrun.resumable``, ``Checkpointer`` and the frameworks capture and restore the generators of
a rank here, and nowhere else. A state is tensors and plain data.
"""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import get_worker_info

from hpcrun.devices import accelerator

# All generators of a rank


def capture_generators() -> dict[str, Any]:
    """Return the states of this rank's global generators: of python, numpy, torch and its accelerators."""
    return {
        "python": random.getstate(),
        "cpu": torch.get_rng_state(),
        "numpy": capture_numpy(),
        "accelerators": accelerator.generator_states(),
    }


def restore_generators(saved: dict[str, Any]) -> list[str]:
    """Restore the result of :func:`capture_generators`, as the last step: an iterator draws when it is made.

    Returns:
        A sentence for each generator that could not be restored.
    """
    notes = []
    random.setstate(saved["python"])
    torch.set_rng_state(saved["cpu"])
    if saved["numpy"] is not None:
        np.random.set_state(to_numpy(saved["numpy"]))
    devices = saved.get("accelerators")
    if devices is not None:
        note = accelerator.restore_generators(devices)
        notes += [] if note is None else [note]
    return notes


@contextmanager
def kept_generators() -> Iterator[None]:
    """Restore this rank's generators after the block, unless it fails: a device may not answer then."""
    kept = capture_generators()
    yield
    restore_generators(kept)


# The global generators of the CPU: a copy for each batch must not wait for a device.


def cpu_states() -> tuple[Any, Any, torch.Tensor]:
    """Return the states of the global generators of python, numpy and torch's CPU."""
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_cpu_states(found: tuple[Any, Any, torch.Tensor]) -> None:
    """Restore the result of :func:`cpu_states`."""
    random.setstate(found[0])
    np.random.set_state(found[1])
    torch.set_rng_state(found[2])


def seed_cpu(seed: int) -> None:
    """Seed the global generators of python, numpy and torch's CPU."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    # Not torch.manual_seed, which also seeds the devices: training uses their generators.
    torch.default_generator.manual_seed(seed)


def seed_all(seed: int) -> None:
    """Seed the global generators of python, numpy, torch's CPU and the accelerators."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


@contextmanager
def set_apart() -> Iterator[None]:
    """Run a block that seeds the global CPU generators; restore them afterwards, but not in a worker."""
    before = None if get_worker_info() else cpu_states()
    try:
        yield
    finally:
        if before is not None:
            set_cpu_states(before)


class OwnRandomness:
    """Separate CPU generators for blocks: they continue from the end of the block before."""

    def __init__(self, *numbers: int) -> None:
        """Seed the generators from ``numbers``."""
        with set_apart():
            seed_cpu(mixed(*numbers))
            self._states = cpu_states()

    @contextmanager
    def used(self) -> Iterator[None]:
        """Run a block with these generators in place of the training's."""
        before = cpu_states()
        set_cpu_states(self._states)
        try:
            yield
        finally:
            self._states = cpu_states()
            set_cpu_states(before)


# Seeds from a position. A change of a mixture would change the bits of every training that resumes.


def mixed(*numbers: int) -> int:
    """Return a seed of 63 bits that depends on every number; numbers must not be negative."""
    return int(np.random.SeedSequence(numbers).generate_state(1, np.uint64)[0]) >> 1


def seed_at(*numbers: int) -> None:
    """Seed the global generators of a loader process from ``numbers``: the position of a sample.

    A loader process's default generators depend on when the process was started, which a resume changes.
    """
    seed_cpu(int(np.random.SeedSequence(numbers).generate_state(1)[0]))


def seed_all_from(*numbers: int) -> None:
    """Do as :func:`seed_all`, with a seed that depends on every number."""
    words = np.random.SeedSequence(numbers).generate_state(2, np.uint32)
    seed_all(int(words[0]) << 31 ^ int(words[1]))


# Generators of the user

KINDS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)
"""The types of generators."""


def generator_state(generator: Any) -> Any:
    """Return the state of a generator of one of the :data:`KINDS`."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, np.random.Generator):
        return from_numpy(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return from_numpy(generator.get_state(legacy=False))
    return generator.getstate()


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore the result of :func:`generator_state`."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = to_numpy(state)
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(to_numpy(state))
    else:
        generator.setstate(state)


def seed_generator(generator: Any, seed: int) -> None:
    """Seed a generator of one of the :data:`KINDS` in place."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        generator.seed(seed % 2**32)
    else:
        generator.seed(seed)


def fingerprint(generator: Any) -> int:
    """Return a number of 63 bits for the state of a generator of one of the :data:`KINDS`."""
    state: Any
    if isinstance(generator, torch.Generator):
        state = generator.get_state().numpy().tobytes()
    elif isinstance(generator, np.random.Generator):
        state = repr(generator.bit_generator.state).encode()
    elif isinstance(generator, np.random.RandomState):
        state = repr(generator.get_state(legacy=False)).encode()
    else:
        state = repr(generator.getstate()).encode()
    return xxhash.xxh3_64_intdigest(state) >> 1


# States of numpy, whose arrays a load with ``weights_only`` does not read


def capture_numpy() -> Any:
    """Return the state of numpy's global generator as tensors and plain data."""
    return from_numpy(np.random.get_state(legacy=False))


def from_numpy(value: Any) -> Any:
    """Return ``value`` with tensors and plain numbers in place of numpy's."""
    if isinstance(value, dict):
        return {key: from_numpy(child) for key, child in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    return value.item() if isinstance(value, np.generic) else value


def to_numpy(value: Any) -> Any:
    """Return ``value`` with arrays in place of tensors."""
    if isinstance(value, dict):
        return {key: to_numpy(child) for key, child in value.items()}
    return value.numpy() if isinstance(value, torch.Tensor) else value
