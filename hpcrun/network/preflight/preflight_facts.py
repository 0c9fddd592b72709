"""The facts that a preflight has gathered, and the results that follow from them, as plain data."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "unknown"]
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class JobNeeds:
    """The part of a job that its nodes have to serve.

    ``gpus``: GPUs per node; 0: none; None: any number. ``run``: the run directory, if there is a run.
    ``apart``: the nodes are separate machines, not processes of one machine.
    """

    gpus: int | None = None
    run: str | None = None
    apart: bool = True


@dataclass
class PreflightFacts:
    """All facts of a preflight.

    ``facts``: of each node, by section. ``silent``: nodes without an answer, each with the reason. ``late``:
    nodes that answered only the second time, each with the reason of the first failure. ``offsets``: seconds
    by which a node's clock is ahead of the coordinator's, with the uncertainty.
    """

    nodes: list[str]
    asked: JobNeeds
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)
    offsets: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0

    def add_second(self, again: "PreflightFacts") -> None:
        """Add the facts from the second check of the nodes that did not answer the first time."""
        for node in again.nodes:
            first = self.silent.pop(node)
            if node in again.silent:
                self.silent[node] = f"{again.silent[node]}; before: {first}"
            else:
                self.late[node] = first
            # Replace the answers that the node gave before it stopped answering.
            self.facts[node] = again.facts.get(node, {})
        self.offsets.update(again.offsets)
        self.seconds = round(self.seconds + again.seconds, 2)


@dataclass(frozen=True)
class Result:
    """A check's result on ``node`` (None: about all nodes), in words, and the remedy."""

    check: str
    node: str | None
    status: Status
    words: str
    remedy: str = ""

    def as_record(self) -> dict[str, Any]:
        """Return the result as one flat JSON object."""
        return asdict(self)
