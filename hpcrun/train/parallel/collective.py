"""Run a function on every rank; if it fails on one rank, raise on all of them instead of hanging.

If one rank just exits, the remaining ranks see a broken connection, and the log does not show the cause.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from hpcrun.errors import UserError
from hpcrun.run.endings import node_name
from hpcrun.train.determinism import explain_refusals
from hpcrun.train.errors import NotTrainable, PeerFailed, error_on_all_ranks

T = TypeVar("T")


def together(compute: Callable[[], T], *, rank: int, group: Any) -> T:
    """Run ``compute`` on every rank; return this rank's result if all ranks succeed. Collective.

    Args:
        group: a control group of all ranks; None for a single rank: exceptions propagate unchanged.

    Raises:
        UserError: on all ranks if any rank raised one; the text of the lowest such rank.
        PeerFailed: on the ranks that did not fail.
        Exception: on a failed rank, its own exception.
    """
    if group is None:
        return compute()
    value: Any = None
    error: Exception | None = None
    refusal: str | None = None
    certain = False
    try:
        with explain_refusals():
            value = compute()
    except Exception as raised:
        error = raised
        refusal = str(raised) if isinstance(raised, UserError) else None
        certain = isinstance(raised, NotTrainable)
    words: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(words, (error is not None, refusal, node_name(), certain), group=group)
    refused = [word for word in words if word[1] is not None]
    for peer, (_, text, host, _) in enumerate(words):
        if text is not None:
            line = text if peer == 0 else f"rank {peer} ({host}): {text}"
            everywhere = {word[2] for word in refused} == {word[2] for word in words}
            certain = any(word[3] for word in refused)
            raise error_on_all_ranks(
                line, rank, everywhere=everywhere, certain=certain, host=host
            ) from error
    if error is not None:
        raise error
    failed = [peer for peer, (bad, *_) in enumerate(words) if bad]
    if failed:
        raise PeerFailed(f"rank {failed[0]} failed; see its log")
    result: T = value
    return result
