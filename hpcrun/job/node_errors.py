"""Errors that may concern some nodes only, from the journal of the run and the records of its ranks."""

import time
from collections.abc import Sequence

from hpcrun.diagnose.causes import CERTAIN
from hpcrun.run.attempt import Attempt
from hpcrun.run.endings import Failure, is_cascade, node_name
from hpcrun.run.failures.of_nodes import is_there
from hpcrun.run.journal.events import BadInput, Saved, Stepped
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


def _only_there(state: State, attempt: Attempt, own: Sequence[Failure]) -> bool:
    """Return True if one other node of several lacks a file that this node has."""
    first = own[0]
    if first.host == node_name() or not _on_one_of_several(state, attempt, own):
        return False
    return first.bad_input and is_there(first.message)


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
    if refusal:
        return False
    works = (Saved,) if own else (Saved, Stepped)
    saved = any(state.of(attempt).of_kind(*works))
    if not own:
        return saved or state.ran_long(attempt, time.time())
    if _only_there(state, attempt, own):
        return True
    if own[0].kind in _OF_FILES and state.of_script and _on_one_of_several(state, attempt, own):
        return True
    # The last message of a script that has run for long may come from a program that the script called.
    return saved or state.ran_long(attempt, own[0].time)
