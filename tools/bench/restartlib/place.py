"""The cluster of the benchmark as its job user sees it, and the marks of the ranks."""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from restartlib.marks import FILE
from tests.on_slurm.cluster import SlurmCluster

ROOT = Path(__file__).resolve().parents[3]
PATIENCE = 300.0
"""Seconds for each wait: a start on a busy machine takes a minute."""
# Seconds between two looks. A look reads files only.
_LOOK = 0.02
VICTIM = 3
"""The rank that fails. Rank 0 is on the other node, with the batch script."""


@dataclass(frozen=True)
class Mark:
    """A line of the marks. ``time``: Unix seconds."""

    what: str
    time: float
    rank: int
    pid: int
    host: str


class Stuck(Exception):
    """A wait took too long; the text says for what."""


class Place:
    """A folder of the job user for one run."""

    def __init__(self, slurm: SlurmCluster, name: str) -> None:
        self.slurm, self.name = slurm, name
        self.folder = slurm.shared / name
        slurm.run(["mkdir", str(self.folder)])

    def environ(self, **more: str) -> dict[str, str]:
        """Return the variables for the ranks of every system: this checkout, and one thread per rank."""
        paths = [str(ROOT), str(ROOT / "tools" / "bench")]
        return {
            **{"PYTHONPATH": ":".join(paths), "XDG_STATE_HOME": str(self.folder)},
            **{"OMP_NUM_THREADS": "1", FILE: str(self.folder / "marks"), **more},
        }

    def marks(self) -> list[Mark]:
        """Return all marks, in order."""
        try:
            text = (self.folder / "marks").read_text()
        except FileNotFoundError:
            return []
        # A rank may be writing the last line.
        lines = text.rpartition("\n")[0].splitlines()
        return [Mark(**json.loads(line)) for line in lines]

    def trained(self) -> float:
        """Return the seconds since the end of the first step; 0 before it."""
        steps = (mark.time for mark in self.marks() if mark.what == "step")
        return time.time() - next(steps, time.time())

    def newest(self, rank: int) -> Mark:
        """Return the last mark of ``rank``."""
        return next(mark for mark in reversed(self.marks()) if mark.rank == rank)

    def resumed(self, old: Mark, fault: float) -> list[Mark]:
        """Return the marks of the process that took rank 0's first step after the fault; none before it.

        Args:
            old: a mark of rank 0 before the fault.
            fault: Unix seconds.
        """
        late = [mark for mark in self.marks() if mark.time > fault and mark.pid != old.pid]
        steps = [mark.pid for mark in late if (mark.rank, mark.what) == (0, "step")]
        return [mark for mark in late if mark.pid in steps[:1]]

    def end(self) -> None:
        """Cancel the job, and undo the faults."""
        self.slurm.cancel_all()
        self.slurm.heal()


def wait(what: Callable[[], bool], why: str) -> None:
    """Wait until ``what`` is true.

    Raises:
        Stuck: it is not true after five minutes.
    """
    late = time.monotonic() + PATIENCE
    while not what():
        if time.monotonic() > late:
            raise Stuck(f"{why}: not after {PATIENCE:.0f} s")
        time.sleep(_LOOK)


def programs(name: str, word: str) -> list[int]:
    """Return the processes of the program ``name`` with an argument that starts with ``word``."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            given = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if Path(given[0]).name == name and any(one.startswith(word) for one in given):
            found.append(int(folder.name))
    return found


class Ends:
    """The ends of some processes, as looks at them find them."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._alive, self.at = list(pids), time.time()

    def look(self) -> bool:
        """Return True if all have ended; ``at`` is then the time (Unix seconds) of the look that found it."""
        if self._alive:
            self._alive = [pid for pid in self._alive if not _has_ended(pid)]
            self.at = time.time()
        return not self._alive


def _has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
