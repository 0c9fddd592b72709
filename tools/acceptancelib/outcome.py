"""Jobs and outcomes of checks. Without torch, because the program needs them before a heavy import."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

Result = Literal["pass", "warn", "fail", "unknown", "not run"]
RESULTS: tuple[Result, ...] = ("pass", "warn", "fail", "unknown", "not run")

REPORT = "please open an issue with the JSON file"
"""The remedy for a failure that the user cannot repair."""


@dataclass(frozen=True)
class Outcome:
    """One line of the page: a result, a sentence, and the remedy if the result is not ``pass``.

    ``details``: further figures for the JSON file, plain data.
    """

    name: str
    result: Result
    line: str
    remedy: str = ""
    details: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Job:
    """The task of the process of a check.

    ``gpus``: GPUs to use; 0 in a simulation. ``folder``: an empty folder. ``seconds``: the time limit.
    """

    check: str
    gpus: int
    folder: str
    seconds: float

    @property
    def simulated(self) -> bool:
        """True if CPUs and gloo replace GPUs and NCCL."""
        return self.gpus == 0

    @property
    def ranks(self) -> int:
        """Number of processes in checks of several ranks."""
        return self.gpus or 2

    @property
    def place(self) -> Path:
        """Return ``folder`` as a path."""
        return Path(self.folder)


def needs_gpu(name: str, what: str = "a GPU") -> Outcome:
    """Return the outcome of a check that the machine cannot run."""
    return Outcome(name, "not run", f"needs {what}")


@dataclass(frozen=True)
class Check:
    """A check: module in this package, purpose, and time limit in seconds on GPUs."""

    module: str
    purpose: str
    seconds: float


CHECKS = {
    "environment": Check("environment", "GPUs, driver, libraries, recorded environment", 60),
    "precision": Check("precision", "a step in each precision, and a planted inf", 90),
    "collectives": Check("collectives", "hashes of sums in two fresh sets of processes", 90),
    "staging": Check("staging", "page-locked memory and the time of a snapshot", 60),
    "fsdp": Check("sharded", "a sharded step, its checkpoint and its resume", 120),
    "deferred": Check("deferred", "a model whose weights are computed after sharding", 90),
    "estimate": Check("memory", "measured memory, and the figure of hpcrun estimate", 120),
    "failure": Check("failure", "the peers of a failed rank end within seconds", 150),
    "resume": Check("resume", "an interrupted run ends with the same bits", 240),
    "compile": Check("compiled", "compiled steps, also with CUDA graphs", 180),
    "bench": Check("bench", "throughput and MFU of a run of llama-1b.yaml", 360),
}
"""The checks, in the order in which they run: the fast ones first."""

SLOWER = 10
"""Factor of the time limits in a simulation."""
