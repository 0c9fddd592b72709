"""Child processes with torch: their import of torch and their orders have separate limits."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hpcrun.network.agents import Processes

PROGRAM = (sys.executable, "-m", "hpcrun.network.torch_rank")
IMPORT = 120.0
"""Seconds for the import of torch by the ranks of an all-reduce."""


class TorchChild(Processes):
    """One process of `hpcrun.network.torch_rank`: its answers, and its end. ``env``: further variables."""

    def __init__(
        self, program: Sequence[str] = PROGRAM, env: Mapping[str, str] | None = None
    ) -> None:
        quiet = {"TORCH_CPP_LOG_LEVEL": "ERROR"}
        super().__init__([(program, {**os.environ, **quiet, **(env or {})})])
        self.answers: list[dict[str, Any]] = []

    def wait(self, stages: Sequence[str], seconds: float) -> dict[str, Any]:
        """Wait for an answer of ``stages``, the end of the process, or for some seconds.

        Returns:
            The last answer; without it the ``stage`` is ``failed``, with the ``problem``, or ``hangs``.
            ``after`` is the stage before.
        """
        end = time.monotonic() + seconds
        while self._stage() not in stages:
            answer = self.hear(end - time.monotonic())
            if answer is None:
                return self._without_answer()
            self.answers.append(answer)
        return self.answers[-1]

    def _without_answer(self) -> dict[str, Any]:
        if not self.ended():
            return {"stage": "hangs", "after": self._stage()}
        self.join()
        last = (self.words().strip().splitlines() or ["it ended without output"])[-1]
        return {"stage": "failed", "problem": last[:300], "after": self._stage()}

    def _stage(self) -> str | None:
        return self.answers[-1].get("stage") if self.answers else None


class NodeRanks:
    """The ranks of this node, for one all-reduce at a time. ``program``: the command of a rank."""

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        self._program = program
        self._started: list[TorchChild] = []

    def prepare(
        self, count: int | None = None, env: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Start the ranks; return the GPUs, the versions and the port of rank 0, or a problem.

        Args:
            count: number of ranks; None: one for each GPU, or one.
            env: variables that are set in addition.
        """
        self.close()
        end = time.monotonic() + IMPORT
        self._started = [TorchChild(self._program, env) for _ in range(count or 1)]
        first = self._started[0].wait(("here",), IMPORT)
        if count is None:
            more = first.get("gpus", 0) - 1
            self._started += [TorchChild(self._program, env) for _ in range(more)]
        seen = [rank.wait(("here",), end - time.monotonic()) for rank in self._started]
        return next((one for one in seen if one["stage"] != "here"), first)

    def run(self, order: Mapping[str, Any], rank: int, count: int) -> dict[str, Any]:
        """Run ``count`` ranks from number ``rank`` on; return the figures of the first, or a problem."""
        end = time.monotonic() + order["limit"]
        ranks = self._started[:count]
        for local, child in enumerate(ranks):
            child.tell({**order, "do": "measure", "rank": rank + local, "local": local})
        seen = [child.wait(("done", "failed"), end - time.monotonic()) for child in ranks]
        self.close()
        return next((one for one in seen if one["stage"] != "done"), seen[0])

    def close(self) -> None:
        """End all ranks."""
        for rank in self._started:
            rank.kill()
        self._started = []
