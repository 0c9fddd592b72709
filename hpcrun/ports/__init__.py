"""The ports of hpcrun: the types with which another package adds to hpcrun without a change of it.

A package registers a command, a metric sink, a check of nodes, a strategy or a task as an entry point of its
distribution; docs/extending.md has an example of each. No module here imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcrun.ports.node_checks import Answer, Needs, NodeCheck, Same, Timed, node_check
    from hpcrun.ports.sinks import Sink, TrainingStart, numbers
    from hpcrun.ports.strategies import AttemptEnd, Start

__all__ = [
    "Answer",
    "AttemptEnd",
    "Needs",
    "NodeCheck",
    "Same",
    "Sink",
    "Start",
    "Timed",
    "TrainingStart",
    "node_check",
    "numbers",
]

_HOMES = {
    **dict.fromkeys(
        ("Answer", "Needs", "NodeCheck", "Same", "Timed", "node_check"), "hpcrun.ports.node_checks"
    ),
    **dict.fromkeys(("Sink", "TrainingStart", "numbers"), "hpcrun.ports.sinks"),
    **dict.fromkeys(("AttemptEnd", "Start"), "hpcrun.ports.strategies"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
