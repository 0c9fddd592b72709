"""What the watchdogs of several ranks show together."""

from hpcrun.diagnose.finding import FailureFinding, find_cause
from hpcrun.diagnose.read_log import labeled

LATE = (
    "[rank{0}]:[E218 04:54:22.8 ProcessGroupNCCL.cpp:616] [Rank {1}] Watchdog caught collective operation "
    "timeout: WorkNCCL(SeqNum={2}, OpType={3}, NumelIn={4}, NumelOut={4}, Timeout(ms)=600000) ran for 600045 "
    "milliseconds before timing out."
)
GROUP = (
    "[rank{0}]:[E218 04:54:22.9 ProcessGroupNCCL.cpp:1795] [PG ID 3 PG GUID {1} Rank {2}] Exception (either "
    "an error or timeout) detected by watchdog at work: {3}, last enqueued NCCL work: {3}, last "
    "completed NCCL work: 5."
)
WAITED = (
    "[rank{0}]:[E1002 18:16:40.7 ProcessGroupNCCL.cpp:756] [Rank {0}] Work WorkNCCL(SeqNum={1}, "
    "OpType=ALLREDUCE, NumelIn=1, NumelOut=1, Timeout(ms)=600000) timed out in blocking wait."
)


def cause(*texts: str) -> FailureFinding:
    """Return the finding in a log of ``texts``."""
    found = find_cause(labeled(text, "job.log", at) for at, text in enumerate(texts, 1))
    assert found is not None
    assert found.id == "collective-timeout"
    return found


def test_a_blocking_wait_counts_as_a_time_out() -> None:
    found = cause(WAITED.format(3, 12), LATE.format(1, 1, 12, "ALLREDUCE", 1))
    assert (found.rank, found.ranks) == (None, (1, 3))
    assert found.notes[0].startswith("all 2 ranks that reported are at collective 12; none of them")
    assert "TORCH_NCCL_BLOCKING_WAIT" in found.notes[1]
    assert cause(WAITED.format(0, 7), WAITED.format(2, 9)).rank == 0


def test_two_process_groups_are_told_apart() -> None:
    found = cause(
        LATE.format(13, 1, 216, "ALLTOALL_BASE", 8),
        GROUP.format(13, 119, 1, 216),
        LATE.format(15, 1, 57, "ALLREDUCE", 32),
        GROUP.format(15, 112, 0, 57),
    )
    (note,) = found.notes
    assert "rank 13 in ALLTOALL_BASE of 8 elements (process group 119, collective 216)" in note
    assert "rank 15 in ALLREDUCE of 32 elements (process group 112, collective 57)" in note
    assert "several process groups in different orders" in note
    assert found.rank is None


def test_different_collectives_at_neighboring_positions_are_named() -> None:
    found = cause(
        LATE.format(0, 0, 1516, "ALLREDUCE", 25427968), LATE.format(1, 1, 1517, "ALLREDUCE", 1)
    )
    assert found.rank == 0
    assert found.notes[0] == "rank 0 had begun collective 1516, and others 1517"
    assert "the ranks call different collectives" in found.notes[1]
    found = cause(LATE.format(0, 0, 9, "BROADCAST", 4), LATE.format(1, 1, 9, "ALLGATHER", 4))
    assert "rank 0 in BROADCAST of 4 elements (collective 9); rank 1 in ALLGATHER" in found.notes[1]
    found = cause(*(LATE.format(rank, rank, 9, "ALLREDUCE", 4) for rank in (0, 1)))
    assert len(found.notes) == 1
