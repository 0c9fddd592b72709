"""Trials: new processes with a new process group for each setting, forked by the ranks of the search."""

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun.errors import NetworkError
from hpcrun.network.agents import Processes
from hpcrun.network.tune.search import Cell, Env, Site, Trial
from hpcrun.slurm.environment import without_rank_requests

WORKER = (sys.executable, "-m", "hpcrun.network.tune.worker")
_STOPPING = 30.0
"""Seconds for the ranks to end the processes of a trial."""

# srun sets the variables of a task; a shell copies them to the names that the worker reads.
_PLACED = (
    'HPCRUN_TUNE_RANK="$SLURM_PROCID" HPCRUN_TUNE_RANKS="$SLURM_NTASKS" '
    'HPCRUN_TUNE_LOCAL="$SLURM_LOCALID" exec "$@"'
)


@dataclass(frozen=True)
class Grid:
    """The measurements of a trial.

    ``seconds``: approximate time for each cell. ``patience``: seconds for a whole trial.
    """

    backend: str
    collectives: Sequence[str]
    sizes: Sequence[int]
    seconds: float = 0.2
    patience: float = 300.0


class TrialRanks:
    """The ranks of a search, which fork a process for each trial. A context manager that ends them.

    Args:
        fleet: the processes of the ranks.
        patience: seconds for all ranks to start.

    Raises:
        NetworkError: a rank does not start, or ends during the search.
    """

    def __init__(self, fleet: Processes, ranks: int, patience: float = 300.0) -> None:
        self.ranks, self._fleet, self._number = ranks, fleet, 0
        self._heard: list[dict[str, Any]] = []
        try:
            self.site = self._meet(time.monotonic() + patience)
        except BaseException:
            fleet.close()
            raise

    def __enter__(self) -> "TrialRanks":
        return self

    def __exit__(self, *_: object) -> None:
        self._fleet.close()

    def trial(self, env: Env, grid: Grid) -> Trial:
        """Measure ``grid`` with the variables ``env`` set in addition to the environment."""
        self._number += 1
        self._heard.clear()
        self._fleet.tell({"type": "trial", "number": self._number, "env": dict(env)})
        try:
            return self._talk(grid, time.monotonic() + grid.patience)
        finally:
            self._fleet.tell({"type": "stop"})
            end = time.monotonic() + _STOPPING
            while self._count("stopped") < self.ranks:
                if not self._hear(end):
                    raise NetworkError(f"a rank has ended during the search: {self._words()}")

    def _meet(self, end: float) -> Site:
        while self._count("hello") < self.ranks:
            if not self._hear(end):
                count = self._count("hello")
                raise NetworkError(f"{count} of {self.ranks} ranks started: {self._words()}")
        common = set.intersection(*(set(one["interfaces"]) for one in self._heard))
        return Site(
            nodes=len({one["host"] for one in self._heard}),
            ranks=self.ranks,
            interfaces=tuple(sorted(common)),
            rdma=all(one["rdma"] for one in self._heard),
            version=self._heard[0]["nccl"],
        )

    def _talk(self, grid: Grid, end: float) -> Trial:
        reported = False
        while self._count("done") < self.ranks:
            if not self._hear(end):
                done = f"{self._count('done')} of {self.ranks} ranks are done"
                return Trial(problem=f"no end in {grid.patience:.0f} s: {done}")
            answer = self._heard[-1]
            if answer["type"] == "failed":
                return Trial(problem=f"rank {answer['rank']}: {answer['problem']}")
            if answer["type"] == "store" and not reported:
                reported = True
                where = {"addresses": answer["addresses"], "port": answer["port"]}
                self._fleet.tell({"type": "measure", **where, **vars(grid)})
        cells = [one for one in self._heard if one["type"] == "cell"]
        timings = {Cell(one["collective"], one["size"]): one["seconds"] for one in cells}
        return Trial(timings) if timings else Trial(problem="no collective was measured")

    def _hear(self, end: float) -> bool:
        """Wait for an answer of this trial; return False without an answer before ``end``."""
        while True:
            answer = self._fleet.hear(end - time.monotonic())
            if answer is None:
                return False
            if answer.get("trial") == self._number:
                self._heard.append(answer)
                return True

    def _count(self, kind: str) -> int:
        return sum(one["type"] == kind for one in self._heard)

    def _words(self) -> str:
        return " ".join(self._fleet.words().split())[-300:] or "no answer"


def here(ranks: int, prefixes: Sequence[Sequence[str]] = ()) -> Processes:
    """Start ``ranks`` processes of this machine.

    Args:
        prefixes: words before the command of each rank, such as those that enter a network namespace.
    """
    commands: list[tuple[Sequence[str], Mapping[str, str]]] = []
    for rank in range(ranks):
        place = {"HPCRUN_TUNE_RANK": str(rank), "HPCRUN_TUNE_RANKS": str(ranks)}
        prefix = prefixes[rank] if prefixes else ()
        environ = os.environ | place | {"HPCRUN_TUNE_LOCAL": str(rank)}
        commands.append(([*prefix, *WORKER], environ))
    return Processes(commands)


def srun_command(nodes: Sequence[str], tasks: int) -> list[str]:
    """Build the step of ``tasks`` ranks per node; each rank sees all GPUs of its node."""
    options = ["--nodes", str(len(nodes)), "--ntasks", str(len(nodes) * tasks)]
    options += ["--ntasks-per-node", str(tasks), "--nodelist", ",".join(nodes), "--overlap"]
    options += ["--mem=0", "--cpu-bind=none", "--gpu-bind=none", "--export=ALL"]
    # Otherwise the other ranks would wait for a failed rank.
    options += ["--kill-on-bad-exit=1", "--wait=10"]
    return ["srun", *options, "sh", "-c", _PLACED, "sh", *WORKER]


def on_slurm(nodes: Sequence[str], tasks: int) -> Processes:
    """Start ``tasks`` ranks on each of ``nodes``, which are part of this allocation."""
    own = without_rank_requests(os.environ)
    return Processes([(srun_command(nodes, tasks), own)])
