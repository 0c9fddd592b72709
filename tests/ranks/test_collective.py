"""A call that fails on one rank raises on all ranks, in the way that the caller needs."""

import pytest
import torch.distributed as dist

from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.storage.errors import CheckpointError
from tests.support.on_ranks import gathered, ranks


def end_of(call):
    """Return the result of ``call``, or its exception as text."""
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@ranks(3)
def test_each_rank_raises_what_the_caller_needs(rank, monkeypatch):
    monkeypatch.setenv("SLURMD_NODENAME", f"n{rank}")
    group = dist.new_group(backend="gloo")
    plain, chosen = Ranks(rank, 3, group), Ranks(rank, 3, group, CheckpointError)

    def failing(error, *on):
        def compute():
            if rank in on:
                raise error(f"bad {rank}")
            return ["a", "b", "c"]

        return compute

    def ends(call, error, *on):
        return gathered(end_of(lambda: call(failing(error, *on))))

    assert ends(chosen.together, UserError, 1, 2) == [
        "CheckpointError: rank 1 (n1): bad 1 (and 1 more)",
        "UserError: bad 1",
        "UserError: bad 2",
    ]
    assert ends(chosen.together, ValueError, 2) == [
        *["CheckpointError: rank 2 (n2): ValueError: bad 2"] * 2,
        "ValueError: bad 2",
    ]
    # An inner call has named the rank.
    named = failing(lambda text: CheckpointError(f"rank 2 (n2): {text}"), 2)
    assert gathered(end_of(lambda: chosen.together(named))) == [
        *["CheckpointError: rank 2 (n2): bad 2"] * 3
    ]
    # A UserError of one rank is the answer, even if another rank fails otherwise.
    mixed = failing(UserError, 2) if rank == 2 else failing(ValueError, 0)
    assert gathered(end_of(lambda: plain.together(mixed))) == [
        "ErrorOnAllRanks: rank 2 (n2): bad 2",
        *["PrintedByRankZero: rank 2 (n2): bad 2"] * 2,
    ]
    for call in (plain.from_rank_0, plain.scatter_from_rank_0):
        assert ends(call, UserError, 0) == [
            "ErrorOnAllRanks: bad 0",
            *["PrintedByRankZero: bad 0"] * 2,
        ]
        assert ends(call, ValueError, 0) == [
            "ValueError: bad 0",
            *["PeerFailed: rank 0 failed; see its log"] * 2,
        ]
    for call in (chosen.from_rank_0, chosen.scatter_from_rank_0):
        assert ends(call, ValueError, 0) == [
            "ValueError: bad 0",
            *["CheckpointError: rank 0 (n0): ValueError: bad 0"] * 2,
        ]
    # Only rank 0 makes the call, so an error on the other ranks does not exist.
    assert ends(plain.from_rank_0, ValueError, 1, 2) == [["a", "b", "c"]] * 3
    assert ends(plain.scatter_from_rank_0, ValueError, 1, 2) == ["a", "b", "c"]


def test_a_single_rank_raises_its_own_exception():
    for alone in (Ranks(), Ranks(peer_error=CheckpointError)):
        for call in (alone.together, alone.from_rank_0, alone.scatter_from_rank_0):
            with pytest.raises(UserError, match=r"^no data$") as caught:
                call(refuses)
            assert caught.type is UserError
        assert alone.scatter_from_rank_0(lambda: ["a"]) == "a"


def refuses():
    raise UserError("no data")
