"""The ranks of the all-reduce that belong to one node: child processes of the agent."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

_PROGRAM = (sys.executable, "-m", "hpcrun.network.check.allreduce.rank")
_LAST_WORDS = 2.0
IMPORT = 120.0
"""Seconds for the import of torch, which many nodes do at the same time from one file system."""


class _Rank:
    """One child process: its last report, and its end."""

    def __init__(self, program: Sequence[str]) -> None:
        self.said: dict[str, Any] = {}
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
        threading.Thread(target=self._read_facts, daemon=True).start()

    def wait(self, stages: Sequence[str], end: float) -> dict[str, Any]:
        """Wait for a report of ``stages``, the child's end, or the time ``end``; return the last report."""
        with self._heard:
            self._heard.wait_for(
                lambda: self._ended or self.said.get("stage") in stages, end - time.monotonic()
            )
            said = dict(self.said)
            if said.get("stage") in stages:
                return said
            if self._ended:
                # The end of the output may be read before the last line of the errors.
                self._errors.join(_LAST_WORDS)
                last = (self._words.strip().splitlines() or ["it ended without output"])[-1]
                return {"stage": "failed", "problem": last[:300], "after": said.get("stage")}
            return {"stage": "hangs", "after": said.get("stage")}

    def tell(self, order: Mapping[str, Any]) -> None:
        """Send the order to the child; do nothing if the child has ended."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End the child."""
        self._process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=10)

    def _read_facts(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(ValueError), self._heard:
                self.said = json.loads(line)
                self._heard.notify_all()
        with self._heard:
            self._ended = True
            self._heard.notify_all()

    def _read_words(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._words = (self._words + line)[-2000:]


class NodeRanks:
    """The ranks of this node, for one all-reduce at a time."""

    def __init__(self, program: Sequence[str] = _PROGRAM) -> None:
        """Prepare the ranks; ``program``: the command of a rank."""
        self._program = program
        self._started: list[_Rank] = []

    def prepare(self) -> dict[str, Any]:
        """Start a rank for each GPU, or one; return the GPUs and the port of rank 0, or a problem."""
        self.close()
        end = time.monotonic() + IMPORT
        self._started = [_Rank(self._program)]
        first = self._started[0].wait(("here",), end)
        self._started += [_Rank(self._program) for _ in range(first.get("gpus", 0) - 1)]
        said = [rank.wait(("here",), end) for rank in self._started]
        return next((one for one in said if one["stage"] != "here"), first)

    def run(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Run ``count`` ranks from number ``rank`` on; return the figures of the first, or a problem."""
        end = time.monotonic() + order["limit"]
        ranks = self._started[: order["count"]]
        for local, rank in enumerate(ranks):
            rank.tell({**order, "rank": order["rank"] + local, "local": local})
        said = [rank.wait(("done", "failed"), end) for rank in ranks]
        self.close()
        return next((one for one in said if one["stage"] != "done"), said[0])

    def close(self) -> None:
        """End all ranks."""
        for rank in self._started:
            rank.close()
        self._started = []
