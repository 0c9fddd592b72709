"""Checks of nodes: what a check gets and yields, and its limits.

`hpcrun preflight` runs the checks that ``job.node_checks`` or ``--check`` names after hpcrun's own, on every
node, in the environment of the ranks.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Status = Literal["pass", "warn", "fail", "unknown"]


@dataclass(frozen=True)
class Needs:
    """The part of a job that its nodes have to serve.

    Attributes:
        gpus: GPUs per node; 0: none; None: any number.
        run: the run directory, if there is a run.
        hosts: the names of the nodes; empty for processes of one machine.
        interface: ``job.interface``.
        image: ``job.image``.
        version: the version of hpcrun in the batch step.
    """

    gpus: int | None = None
    run: str | None = None
    hosts: Sequence[str] = ()
    interface: str | None = None
    image: str | None = None
    version: str | None = None


@dataclass(frozen=True)
class Answer:
    """A statement about the node.

    Attributes:
        status: ``fail`` keeps the job from starting; ``unknown``: a fact cannot be read.
        words: what was found, with its place.
        remedy: what to do about it.
        everywhere: the status if every node makes a statement with this status.
    """

    status: Status
    words: str
    remedy: str = ""
    everywhere: Status | None = None


@dataclass(frozen=True)
class Same:
    """A value that should be the same on all nodes.

    Attributes:
        what: the name of the value.
        value: the value on this node.
        remedy: what to do about a difference.
        status: of a node that differs.
        of: the device with this value.
        check: the check that reports the value, if not the one that yields it.
    """

    what: str
    value: str
    remedy: str
    status: Status = "fail"
    of: str = ""
    check: str = ""


@dataclass(frozen=True)
class Timed:
    """A time that should be about the same for all devices of one kind.

    Attributes:
        kind: what was timed, and on which kind of device.
        seconds: the time; more than 1.25 times the best is a warning.
        remedy: what to do about a slow device.
        of: the device.
    """

    kind: str
    seconds: float
    remedy: str
    of: str = ""


Record = Answer | Same | Timed
Records = Iterator[Record]


@dataclass(frozen=True)
class NodeCheck:
    """A check of every node, with its limits.

    Attributes:
        function: runs on the node with the :class:`Needs` of the job, and yields records.
        seconds: a node without an answer after this time counts as unfit.
        hardware: a failure excludes the node even if the job has no other node to compare.
    """

    function: Callable[[Needs], Records]
    seconds: float = 120.0
    hardware: bool = False


def node_check(
    *, seconds: float = 120.0, hardware: bool = False
) -> Callable[[Callable[[Needs], Records]], NodeCheck]:
    """Make a check of nodes from a function.

    Args:
        seconds: a node without an answer after this time counts as unfit.
        hardware: a failure excludes the node even if the job has no other node to compare.
    """
    return lambda function: NodeCheck(function, seconds, hardware)
