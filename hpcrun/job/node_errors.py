"""Errors that may concern some nodes only, told by the journal of the run and the records of its ranks."""

from collections.abc import Sequence

from hpcrun.diagnose.causes import CERTAIN, is_cascade
from hpcrun.run.attempt import Attempt
from hpcrun.run.endings import Failure
from hpcrun.run.journal.events import BadInput, Saved
from hpcrun.run.journal.state import State

# Errors of a node without a file that the other nodes have.
_OF_FILES = frozenset(
    {
        *("FileNotFoundError", "ImportError", "ModuleNotFoundError", "NotADirectoryError"),
        "PermissionError",
    }
)


def _on_one_of_several(state: State, attempt: Attempt, failures: Sequence[Failure]) -> bool:
    """Return True if ``attempt`` had several nodes, and only one of them has failures."""
    return state.nodes_of(attempt) > 1 and len({one.host for one in failures}) == 1


def concerns_a_node(state: State, attempt: Attempt, failures: Sequence[Failure]) -> bool:
    """Return True if other nodes may not have the error that ended ``attempt``.

    All nodes of a run that has worked may lose the file server. A single node may lack a mount or a package.

    Args:
        failures: the records of its ranks, earliest first.
    """
    refusal = state.newest(BadInput, attempt)
    own = [failure for failure in failures if not is_cascade(failure)]
    kind = refusal.kind if refusal else (own[0].kind if own else None)
    certain = refusal.certain if refusal else bool(own) and own[0].certain
    if certain or kind in CERTAIN:
        return False
    if state.has_worked(attempt):
        return True
    if refusal or not own:
        return False
    if own[0].kind in _OF_FILES and state.of_script and _on_one_of_several(state, attempt, own):
        return True
    saved = state.newest(Saved, attempt) is not None
    # The last message of a script that has run for long may come from a program that the script called.
    return saved or state.ran_long(attempt, own[0].time)
