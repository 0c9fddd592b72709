"""What one rank cannot do, no rank goes on from: a failure is told to all instead of waited for.

A rank that leaves alone is seen by the others as a broken connection, and its reason is lost in theirs.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hpcrun.errors import UserError
from hpcrun.run.endings import node_name
from hpcrun.train.determinism import refusals_told
from hpcrun.train.errors import NotTrainable, PeerFailed, known_to_all

T = TypeVar("T")


def together(compute: Callable[[], T], *, rank: int, group: Any) -> T:
    """Return what ``compute`` gives on this rank, if it succeeds on every rank. Collective.

    Args:
        group: a control group of all ranks, or None for a single one, whose exceptions just pass.

    Raises:
        UserError: on all ranks, when it was one on any of them; the lowest such rank's text.
        PeerFailed: on the ranks that did not fail themselves.
        Exception: on a rank that failed, its own.
    """
    if group is None:
        return compute()
    value: Any = None
    error: Exception | None = None
    told: str | None = None
    certain = False
    try:
        with refusals_told():
            value = compute()
    except Exception as raised:
        error = raised
        told = str(raised) if isinstance(raised, UserError) else None
        certain = isinstance(raised, NotTrainable)
    words: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(words, (error is not None, told, node_name(), certain), group=group)
    refused = [word for word in words if word[1] is not None]
    for peer, (_, text, host, _) in enumerate(words):
        if text is not None:
            line = text if peer == 0 else f"rank {peer} ({host}): {text}"
            everywhere = {word[2] for word in refused} == {word[2] for word in words}
            certain = any(word[3] for word in refused)
            raise known_to_all(
                line, rank, everywhere=everywhere, certain=certain, host=host
            ) from error
    if error is not None:
        raise error
    failed = [peer for peer, (bad, *_) in enumerate(words) if bad]
    if failed:
        raise PeerFailed(f"rank {failed[0]} has failed; its log says how")
    result: T = value
    return result
