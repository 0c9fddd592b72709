"""What is done about gradients that are not finite: told, traced to samples, and in the end a stop.

Each such step is skipped (stepping.py), on all ranks alike, because all judge the same reduced gradients.
So every rank comes here at the same step, and no rank has to ask.
"""

import math
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from hpcrun.config import Config
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import node_name
from hpcrun.run.events import Attempt, note
from hpcrun.run.files import write_json
from hpcrun.train import order
from hpcrun.train.batching import Batching
from hpcrun.train.data import length
from hpcrun.train.errors import PeerFailed, SaysAll
from hpcrun.train.trainer import AMPTrainer, StepResult

Samples = Callable[[int, int], list[list[int]]]
"""The dataset's indices that a rank takes at a step, a list for each micro-batch."""

DUMPS = 20
"""Steps that one attempt writes down at most, beside the one that it stops at."""


class NotFinite(SaysAll):
    """Gradients were not finite, and training stops; the text names the step, the rank and the dump.

    A failure like any other to the restart policy: another start may help where a chip has erred, and
    where it has not, the second stop at the same step is the last (``restarts.same_step``).
    """


class NonFiniteWatch:
    """Looks at every step's verdict, as soon as it is known."""

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        config: Config,
        trainer: AMPTrainer,
        *,
        start: int,
        rank: int,
        group: Any,
        samples: Samples | None,
    ) -> None:
        """``start``: steps done before; ``group``: a gloo group of all ranks, or None for a single one.

        ``samples``: None where the data is a stream, whose samples have no numbers.
        """
        self._run, self._attempt, self._trainer = run, attempt, trainer
        self._rank, self._group, self._samples = rank, group, samples
        # An overflow is how a dynamic scale finds its height: only many in a row are a trouble.
        self._expected = trainer.scaler.is_enabled() and config.amp.dynamic
        stop = config.train.nonfinite == "stop" and not self._expected
        self._limit = 1 if stop else config.train.nonfinite_limit
        self._key = "train.nonfinite" if stop else "train.nonfinite_limit"
        self._first = start - trainer.gate.steps
        self._seen = trainer.gate.skipped
        self._losses: deque[Tensor] = deque(maxlen=2)
        self._dumps = 0

    def look(self, result: StepResult) -> None:
        """After every step, on every rank.

        Raises:
            NotFinite: it is time to stop, and this rank has something to say about it.
            PeerFailed: it is, and another rank says why.
        """
        self._losses.append(result.loss)
        if self._trainer.gate.skipped != self._seen:
            self._act()

    def settle(self) -> None:
        """After the last step, whose verdict may still be on its way; raises as :meth:`look` does."""
        self._trainer.gate.settle()
        if self._trainer.gate.skipped != self._seen:
            self._act()

    def _act(self) -> None:
        gate = self._trainer.gate
        self._seen = gate.skipped
        in_a_row = gate.skipped_in_row
        stop = in_a_row >= self._limit
        fresh = in_a_row == 1 and not self._expected and self._dumps < DUMPS
        if not stop and not fresh:
            return
        self._dumps += 1
        step = self._first + gate.steps - 1
        ranks = self._gather(self._losses[-2 if gate.pending else -1].item())
        if self._rank == 0:
            self._dump(step, in_a_row, ranks)
        if stop:
            self._stop(step, in_a_row, ranks)

    def _gather(self, loss: float) -> list[tuple[float, str]]:
        """Each rank's loss and host."""
        mine = loss, node_name()
        if self._group is None:
            return [mine]
        found: list[Any] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(found, mine, group=self._group)
        return found

    def _dump(self, step: int, in_a_row: int, ranks: list[tuple[float, str]]) -> None:
        path = self._run.nonfinite(step)
        content = {
            "step": step,
            "in_a_row": in_a_row,
            "time": round(time.time(), 3),
            "job": self._attempt.job,
            "restart": self._attempt.restart,
            "loss_scale": self._trainer.scaler.get_scale() if self._expected else None,
            "ranks": [
                {
                    "rank": rank,
                    "host": host,
                    "loss": loss if math.isfinite(loss) else str(loss),
                    "samples": self._samples(step, rank) if self._samples else None,
                }
                for rank, (loss, host) in enumerate(ranks)
            ],
        }
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            write_json(path, content)
        except OSError as error:
            print(f"hpcrun: {path} is not written: {error}", file=sys.stderr, flush=True)
        print(
            f"hpcrun: step {step} is skipped: gradients are not finite; {_whose(ranks)}; "
            f"its samples are in {path.relative_to(self._run.path)}",
            file=sys.stderr,
            flush=True,
        )
        bad = [rank for rank, (loss, _) in enumerate(ranks) if not math.isfinite(loss)]
        note(self._run, "nonfinite", self._attempt, step=step, in_a_row=in_a_row, ranks=bad)

    def _stop(self, step: int, in_a_row: int, ranks: list[tuple[float, str]]) -> None:
        bad = [rank for rank, (loss, _) in enumerate(ranks) if not math.isfinite(loss)] or [0]
        if self._rank not in bad:
            raise PeerFailed(f"gradients are not finite at step {step}; rank {bad[0]} says more")
        row = f", {in_a_row} steps in a row" if in_a_row > 1 else ""
        name = self._run.nonfinite(step).relative_to(self._run.path)
        raise NotFinite(
            f"gradients are not finite at step {step}{row} ({self._key}); {_whose(ranks)}; look at the "
            f"samples in {name}, at train.lr, or compute in more precision (amp.dtype)"
        )


def _whose(ranks: list[tuple[float, str]]) -> str:
    """Whose loss it comes from, as far as the losses tell."""
    bad = [(rank, loss, host) for rank, (loss, host) in enumerate(ranks) if not math.isfinite(loss)]
    if not bad:
        return "every rank's loss is finite"
    rank, loss, host = bad[0]
    more = f", and of {len(bad) - 1} more" if len(bad) > 1 else ""
    return f"the loss of rank {rank} on {host} is {loss}{more}"


def samples_of(dataset: Dataset[Any], batching: Batching, seed: int) -> Samples | None:
    """Which samples each rank takes at a step, again; None for a stream, whose samples have no numbers."""
    if isinstance(dataset, IterableDataset):
        return None
    size = length(dataset)

    def samples(step: int, rank: int) -> list[list[int]]:
        taken = zip(batching.positions(step, rank), batching.counts(step, rank), strict=True)
        return [order.samples(part, size, seed).tolist() for part, count in taken if count]

    return samples
