"""Child processes with torch: their import of torch and their orders have separate limits."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

PROGRAM = (sys.executable, "-m", "hpcrun.network.torch_rank")
IMPORT = 120.0
"""Seconds for the import of torch by the ranks of an all-reduce."""
_LAST_WORDS = 2.0


class TorchChild:
    """One process of `hpcrun.network.torch_rank`: its answers, and its end."""

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        self.answers: list[dict[str, Any]] = []
        self._words = ""
        self._heard = threading.Condition()
        self._ended = False
        self._process = subprocess.Popen(
            list(program),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env=os.environ | {"TORCH_CPP_LOG_LEVEL": "ERROR"},
        )
        self._errors = threading.Thread(target=self._read_words, daemon=True)
        self._errors.start()
        threading.Thread(target=self._read_answers, daemon=True).start()

    def wait(self, stages: Sequence[str], seconds: float) -> dict[str, Any]:
        """Wait for an answer of ``stages``, the end of the process, or for some seconds.

        Returns:
            The last answer; without it the ``stage`` is ``failed``, with the ``problem``, or ``hangs``.
            ``after`` is the stage before.
        """
        with self._heard:
            self._heard.wait_for(lambda: self._ended or self._stage() in stages, max(0.0, seconds))
            if self._stage() in stages:
                return self.answers[-1]
            if self._ended:
                # The end of the output may be read before the last line of the errors.
                self._errors.join(_LAST_WORDS)
                last = (self._words.strip().splitlines() or ["it ended without output"])[-1]
                return {"stage": "failed", "problem": last[:300], "after": self._stage()}
            return {"stage": "hangs", "after": self._stage()}

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send the order to the process; do nothing if the process has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the process. One that waits for an unavailable file server cannot be killed."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def _stage(self) -> str | None:
        return self.answers[-1].get("stage") if self.answers else None

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError), self._heard:
                self.answers.append(json.loads(line))
                self._heard.notify_all()
        with self._heard:
            self._ended = True
            self._heard.notify_all()

    def _read_words(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._words = (self._words + line)[-2000:]


class NodeRanks:
    """The ranks of this node, for one all-reduce at a time. ``program``: the command of a rank."""

    def __init__(self, program: Sequence[str] = PROGRAM) -> None:
        self._program = program
        self._started: list[TorchChild] = []

    def prepare(self) -> dict[str, Any]:
        """Start a rank for each GPU, or one; return the GPUs and the port of rank 0, or a problem."""
        self.close()
        end = time.monotonic() + IMPORT
        self._started = [TorchChild(self._program)]
        first = self._started[0].wait(("here",), IMPORT)
        self._started += [TorchChild(self._program) for _ in range(first.get("gpus", 0) - 1)]
        seen = [rank.wait(("here",), end - time.monotonic()) for rank in self._started]
        return next((one for one in seen if one["stage"] != "here"), first)

    def run(self, order: Mapping[str, Any], rank: int, count: int) -> dict[str, Any]:
        """Run ``count`` ranks from number ``rank`` on; return the figures of the first, or a problem."""
        end = time.monotonic() + order["limit"]
        ranks = self._started[:count]
        for local, child in enumerate(ranks):
            child.tell({**order, "do": "all-reduce", "rank": rank + local, "local": local})
        seen = [child.wait(("done", "failed"), end - time.monotonic()) for child in ranks]
        self.close()
        return next((one for one in seen if one["stage"] != "done"), seen[0])

    def close(self) -> None:
        """End all ranks."""
        for rank in self._started:
            rank.close()
        self._started = []
