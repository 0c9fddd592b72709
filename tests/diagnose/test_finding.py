"""The initiating error is found among its consequences and the teardown, on any rank and node."""

from hpcrun.diagnose.finding import FailureFinding, find_cause
from hpcrun.diagnose.log_line import LogLine, labeled

OUT_OF_MEMORY = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 3.20 GiB"
CLOSED = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.0.0.2]:60045"
WATCHDOG = (
    "[rank{0}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {0}] Watchdog caught collective "
    "operation timeout: WorkNCCL(SeqNum={1}, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 "
    "milliseconds before timing out."
)
POSITION = (
    "[rank{0}]:[E321 02:07:08.5 ProcessGroupNCCL.cpp:1664] [PG 1 Rank {0}] Exception (either an error or "
    "timeout) detected by watchdog at work: 1580, last enqueued NCCL work: {1}, "
    "last completed NCCL work: 1579."
)
LIMIT = (
    "slurmstepd: error: *** JOB 7 ON node1 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***"
)


def cause(*texts: str) -> FailureFinding:
    """Return the finding in a log of ``texts``."""
    found = find_cause(labeled(text, "job.log", at) for at, text in enumerate(texts, 1))
    assert found is not None
    return found


def test_lines_without_a_failure_have_no_cause() -> None:
    assert find_cause([]) is None
    assert find_cause([LogLine("hpcrun: step 1"), LogLine("done")]) is None


def test_the_own_error_of_a_rank_comes_before_errors_about_it() -> None:
    found = cause(
        f"[rank0]: {CLOSED}",
        f"[rank3]: {OUT_OF_MEMORY}",
        f"[rank1]: {CLOSED}",
        "srun: error: node2: task 3: Exited with exit code 1",
    )
    assert (found.id, found.rank, found.node) == ("gpu-out-of-memory", 3, "node2")
    assert found.cascade == (0, 1)
    assert dict(found.folded) == {"peer-lost": 2, "step-aborted": 1}
    assert found.evidence[0].place == "job.log:2"
    assert found.confidence == "high"


def test_bash_tells_the_signal_that_ended_a_program() -> None:
    script = "/var/spool/slurmd/job00017/slurm_script: line 8: "
    for text, expected in (
        ("  1234 Segmentation fault      (core dumped) python train.py", "segmentation-fault"),
        ("  1234 Bus error               (core dumped) python train.py", "bus-error"),
        ("  1234 Killed                  python train.py", "task-killed"),
        ("  1234 Aborted                 (core dumped) python train.py", "task-killed"),
    ):
        assert cause(script + text).id == expected
        assert cause(OUT_OF_MEMORY, script + text).id == "gpu-out-of-memory"


def test_a_time_decides_between_logs() -> None:
    found = find_cause(
        [
            LogLine("OSError: [Errno 28] No space left on device", "rank-0.log", 9, 0, "n0", 200.0),
            LogLine("OSError: [Errno 122] Disk quota exceeded", "rank-1.log", 4, 1, "n1", 100.0),
        ]
    )
    assert found is not None
    assert (found.id, found.rank, found.node) == ("quota", 1, "n1")
    assert "also seen: a file system is full (rank-0.log:9)" in found.notes


def test_the_rank_without_a_time_out_is_the_one_that_others_wait_for() -> None:
    found = cause(
        *(f"[rank{rank}]: step 12" for rank in range(4)),
        *(WATCHDOG.format(rank, 1580) for rank in (0, 1, 3)),
    )
    assert (found.id, found.rank) == ("collective-timeout", 2)
    assert found.notes[0].startswith("rank 2 reported no time-out")


def test_the_rank_that_came_least_far_is_named() -> None:
    found = cause(
        *(WATCHDOG.format(rank, 1580) for rank in range(3)),
        POSITION.format(0, 1582),
        POSITION.format(1, 1580),
        POSITION.format(2, 1582),
    )
    assert found.rank == 1
    assert found.notes[0] == "rank 1 had begun collective 1580, and others 1582"


def test_a_job_that_hung_until_its_time_limit_failed_because_of_the_hang() -> None:
    assert cause(WATCHDOG.format(0, 7), LIMIT, CLOSED).id == "collective-timeout"
    assert cause(LIMIT, WATCHDOG.format(0, 7), CLOSED).id == "slurm-time-limit"


def test_an_unknown_program_error_is_reported_with_low_confidence() -> None:
    found = cause(
        "[rank2]: Traceback (most recent call last):",
        '[rank2]:   File "train.py", line 7, in <module>',
        "[rank2]: ValueError: the data of call 9 is broken",
        f"[rank0]: {CLOSED}",
    )
    assert (found.id, found.rank, found.confidence) == ("exception", 2, "low")
    assert "the data of call 9 is broken" in found.line


def test_a_module_that_one_node_lacks_is_the_fault_of_the_node() -> None:
    found = find_cause(
        [
            LogLine("ModuleNotFoundError: No module named 'mine'", "rank-1.log", 3, 1, "n1"),
            LogLine("hpcrun: step 1", "rank-0.log", 1, 0, "n0"),
            LogLine(CLOSED, "rank-0.log", 2, 0, "n0"),
        ]
    )
    assert found is not None
    assert (found.id, found.node, found.retry) == ("module-missing", "n1", "elsewhere")
    assert "only n1 of 2 nodes shows it" in found.notes
    assert cause("[rank0]: ModuleNotFoundError: No module named 'mine'").retry == "unlikely"


def test_labels_of_launchers_name_rank_and_node() -> None:
    for text, rank, node in [
        ("[rank3]: boom", 3, None),
        ("[1,5]<stdout>:boom", 5, None),
        (" 12: boom", 12, None),
        ("[trainer3]:boom", 3, None),
        ("node7:97:176 [0] NCCL WARN boom", None, "node7"),
        ("srun: error: node8: task 4: Killed", 4, "node8"),
        ("srun: error: node8: tasks 4-7: Killed", None, "node8"),
        ("slurmstepd-node9: error: boom", None, "node9"),
        ("  rank      : 3 (local_rank: 3)", 3, None),
    ]:
        line = labeled(text, "x", 1)
        assert (line.rank, line.node) == (rank, node), text
    assert labeled("[rank3]: boom", "rank-00009.log", 1, rank=9).rank == 9
    assert labeled("2024-04-18 10:46:28,089 boom", "x", 1).time is not None
    assert labeled("[2024-99-99 10:46:28] boom", "x", 1).time is None
