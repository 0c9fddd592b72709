"""A user's program on a rank, which waits for a fault in each of its first attempts.

``python -m tests.on_slurm.interrupted PROGRAM OUTPUT [faults]``
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed import destroy_process_group, init_process_group
from torch.nn.parallel import DistributedDataParallel

from hpcrun import STOP
from tests.on_slurm import own_examples

WAITS = {0: 2, 1: 4, 2: 2, 3: 2}
"""Steps of an attempt, after which its ranks wait for a fault."""
KILLED = 1
"""Attempt in which rank 1 dies when the file ``kill`` appears."""


class Recorder:
    """Writes the samples of each step of a rank, and waits for the faults.

    The samples of a step are a hash of all batches, with their noise, that DDP was given with gradients on.

    Attributes:
        output: folder of the files.
        model: the model of an example.
    """

    def __init__(self, output: Path, *, faults: bool) -> None:
        self.output, self.model = output, torch.nn.Module()
        self.attempt, self.rank = int(os.environ["HPCRUN_RESTART"]), int(os.environ["RANK"])
        self._faults, self._done = faults, 0
        self._samples: list[str] = []
        forward = DistributedDataParallel.forward

        def recorded(model: Any, *given: Any, **named: Any) -> Any:
            if torch.is_grad_enabled():
                self._samples.append(digest([given, named]))
            return forward(model, *given, **named)

        DistributedDataParallel.forward = recorded

    def __call__(self, step: int) -> None:
        """Write the samples of ``step``, and wait if the attempt has a fault now."""
        with (self.output / f"samples-{self.rank}.jsonl").open("a") as lines:
            lines.write(json.dumps({"step": step, "samples": self._samples}) + "\n")
        self._samples, self._done = [], self._done + 1
        if self._faults and self._done == WAITS.get(self.attempt):
            (self.output / f"waits-{self.attempt}-{self.rank}").touch()
            while not STOP.reason:
                if (self.attempt, self.rank) == (KILLED, 1) and (self.output / "kill").exists():
                    os.kill(os.getpid(), signal.SIGKILL)
                time.sleep(0.05)


def digest(value: Any) -> str:
    """Return a hash of all tensors and other values in ``value``."""
    content = hashlib.sha256()

    def add(one: Any) -> None:
        if isinstance(one, torch.Tensor):
            content.update(one.detach().numpy().tobytes())
        elif isinstance(one, list | tuple):
            for part in one:
                add(part)
        elif hasattr(one, "items"):
            add(sorted(one.items(), key=lambda item: item[0]))
        else:
            content.update(repr(one).encode())

    add(value)
    return content.hexdigest()[:16]


def lightning(at: Recorder) -> str:
    """Train a classifier with Lightning, with a validation in each epoch."""
    from tests.integrations.lightning_programs import with_lightning

    return with_lightning(at)[0]


def transformers(at: Recorder) -> str:
    """Train a GPT-2 with the Trainer of transformers."""
    from tests.integrations.trainings import with_trainer

    return with_trainer(Path("out"), at)[0]


def accelerate(at: Recorder) -> str:
    """Train with Accelerate, with an evaluation in each epoch."""
    from tests.integrations.trainings import with_accelerate

    return with_accelerate(None, at)[0]


def loop(name: str, at: Recorder) -> str:
    """Train in a loop with ``hpcrun.resumable``."""
    from tests.integrations import loops

    init_process_group("gloo")
    weights: str = getattr(loops, name)(None, at)
    destroy_process_group()
    return weights


def example(name: str, at: Recorder) -> str:
    """Run an example of a framework."""
    own_examples.run(own_examples.EXAMPLES[name], at)
    return digest(at.model.state_dict())


PROGRAMS: dict[str, Callable[[Recorder], str]] = {
    "lightning": lightning,
    "transformers": transformers,
    "accelerate": accelerate,
    "tokens": partial(loop, "tokens"),  # with the structure of nanoGPT's train.py
    "gan": partial(loop, "gan"),
    "stream": partial(loop, "stream"),
    **{name: partial(example, name) for name in own_examples.EXAMPLES},
}
"""Programs by name; each returns a hash of its weights."""


def main(program: str, output: str, *faults: str) -> None:
    """Run ``program``, and write the hash of its weights."""
    at = Recorder(Path(output), faults=bool(faults))
    weights = PROGRAMS[program](at)
    (at.output / f"weights-{at.rank}").write_text(weights)


if __name__ == "__main__":
    main(*sys.argv[1:])
