"""The initiating error is found among its consequences and the teardown, on any rank and node."""

import pytest

from hpcrun.diagnose.finding import FailureFinding, find_cause
from hpcrun.diagnose.read_log import LogLine, labeled

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


def test_the_own_error_of_a_rank_comes_before_reports() -> None:
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


@pytest.mark.parametrize("label", ["", "[rank1]: "])
def test_a_line_of_source_is_no_message(label: str) -> None:
    traceback = (
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in main',
        '    raise OSError("CUDA out of memory" if full else "No space left on device") from first',
    )
    lines = [f"{label}{line}" for line in (*traceback, "ModuleNotFoundError: No module named 'a'")]
    assert cause(*lines).id == "module-missing"
    assert cause(*lines[:3], f"{label}ValueError: the loss is not finite").id == "exception"
    assert cause(*lines[:3], f"{label}{OUT_OF_MEMORY}").id == "gpu-out-of-memory"


def test_bash_tells_the_signal_that_ended_a_program() -> None:
    script = "/var/spool/slurmd/job00017/slurm_script: line 8: "
    for text, expected in (
        ("  1234 Segmentation fault      (core dumped) python train.py", "segmentation-fault"),
        ("  1234 Bus error               (core dumped) python train.py", "bus-error"),
        ("  1234 Killed                  python train.py", "rank-killed"),
        ("  1234 Aborted                 (core dumped) python train.py", "aborted"),
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


def test_the_rank_without_a_timeout_is_the_late_rank() -> None:
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
    assert found.notes[0] == "rank 1 had begun collective 1580, and others 1582 (process group 1)"


def test_a_rank_within_a_group_is_not_the_global_rank() -> None:
    late = "[rank{0}]:[E321 02:07:08.4 x.cpp:607] [Rank {1}] Watchdog caught collective operation timeout: "
    late += "WorkNCCL(SeqNum={2}, OpType=_ALLGATHER_BASE, Timeout(ms)=600000) ran for 600060 milliseconds"
    found = cause(
        *(f"[rank{rank}]: step 12" for rank in range(16)),
        late.format(8, 0, 151),
        late.format(9, 1, 151),
        late.format(0, 0, 977),
    )
    assert (found.id, found.rank, found.ranks) == ("collective-timeout", None, (0, 8, 9))
    assert found.notes == ()


def test_positions_of_different_process_groups_are_not_compared() -> None:
    status = (
        "node1: [rank{0}]:[E112 15:47:18.7 x.cpp:2168] [PG ID {1} PG GUID {2} Rank {3}]  failure detected by "
        "watchdog at work sequence id: {4} PG status: last enqueued work: {4}, last completed work: 7"
    )
    tensor, data = (1, "3(mesh_tp)"), (2, "9(mesh_dp)")
    equal = [
        status.format(8, *tensor, 0, 400),
        status.format(9, *tensor, 1, 400),
        status.format(1, *data, 0, 90),
        status.format(9, *data, 1, 90),
    ]
    found = cause(*equal)
    assert (found.rank, found.node) == (None, None)
    where = "collective 400 (process group 3(mesh_tp))"
    assert found.notes == (f"all 2 ranks that reported are at {where}; none of them is behind",)
    found = cause(*equal[:3], status.format(9, *data, 1, 89))
    assert (found.rank, found.node) == (9, "node1")
    assert found.notes[0] == (
        "rank 9 had begun collective 89, and others 90 (process group 9(mesh_dp))"
    )


def test_output_after_a_traceback_does_not_hide_the_failure() -> None:
    """Python writes its buffered output when it ends, and a script reports its end in any case."""
    found = cause(
        "Traceback (most recent call last):",
        '  File "train.py", line 3, in <module>',
        OUT_OF_MEMORY,
        *(f"step {step} loss 2.0" for step in range(50)),
        "Job finished at Tue May 5",
    )
    assert (found.id, found.confidence) == ("gpu-out-of-memory", "high")
    found = cause(
        "[rank1]: OSError: [Errno 28] No space left on device",
        *(f"[rank{rank}]: epoch 1 step 7 loss 2.{rank}" for rank in range(8)),
        "srun: error: node1: task 1: Exited with exit code 1",
    )
    assert (found.id, found.rank) == ("disk-full", 1)
    found = cause(
        "WARNING: Connection reset by peer",
        "step 1 loss 2",
        "step 2 loss 1",
        "step 3 loss 1",
        "[rank0]: RuntimeError: Connection closed by peer [10.0.0.2]",
    )
    assert (found.id, found.evidence[0].line) == ("peer-lost", 5)


def test_the_last_unknown_error_is_quoted_without_a_cause() -> None:
    found = cause(
        "srun: error: the first plugin failed strangely",
        "srun: fatal: the second plugin failed strangely",
        "srun: error: node1: task 0: Exited with exit code 3",
    )
    assert (found.id, found.confidence) == ("unknown", "low")
    assert found.line.startswith("no known failure; the last error: srun: fatal: the second plugin")
    assert cause("OddError: this happened").id == "unknown"


def test_a_traceback_behind_any_label_is_followed() -> None:
    for label in (
        "node1: ",
        "(RayTrainWorker pid=7, ip=10.0.0.2) ",
        "2026-11-23T08:00:00.{0}Z stderr F ",
        "host=a |{0}| ",
    ):
        lines = ["Traceback (most recent call last):", '  File "x.py", line 1', "OddError: broken"]
        found = cause(*(label.format(number) + text for number, text in enumerate(lines)))
        assert (found.id, found.evidence[0].line) == ("exception", 3), label
    found = cause(
        "RuntimeError: Caught ValueError in DataLoader worker process 0.",
        "Original Traceback (most recent call last):",
        '  File "loader.py", line 3, in fetch',
        "ValueError: a sample is broken",
    )
    assert (found.id, "a sample is broken" in found.line) == ("exception", True)


def test_the_node_of_a_memory_failure_is_named() -> None:
    found = cause(
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some tasks have been OOM Killed.",
        "srun: error: node2: tasks 4-7: Out Of Memory",
    )
    assert (found.id, found.node, found.rank) == ("slurm-out-of-memory", "node2", None)


def test_a_hang_until_the_time_limit_is_the_cause() -> None:
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


def test_a_module_that_one_node_lacks_blames_the_node() -> None:
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
        ("node1: [rank8]:[E1 x.cpp:607] [Rank 0] boom", 8, "node1"),
        ("(RayTrainWorker pid=9, ip=10.0.0.2) [rank1]: boom", 1, None),
        (" 3: [rank11]: boom", 11, None),
        ("[default3]:[rank11]: boom", 11, None),
        ("2026-11-23T08:00:00.1Z stderr F [rank3]: boom", 3, None),
        ("Nov 23 08:00:00 node4 python[12]: [rank5]: boom", 5, "node4"),
        ("2026-11-23 08:00:00,089 INFO [rank2]: boom", 2, None),
        ("[E1 x.cpp:1] [PG ID 1 PG GUID 3(mesh_tp) Rank 1] boom", None, None),
        ("[E1 x.cpp:1] [PG 0 (default_pg) Rank 1] boom", 1, None),
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


@pytest.mark.parametrize(
    ("error", "family"),
    [
        ("ImportError: colors needs extra parts. Run `pip install colors[all]`", "package-missing"),
        ("ValueError: sharding requires torch >= 2.9", "package-version"),
        ("KeyError: 'qwen9_moe'", "package-version"),
        ("RuntimeError: num_samples should be a positive integer value, got 0", "data-empty"),
        ("ZeroDivisionError: division by zero", "data-empty"),
        ("ValueError: Expected more than 1 value per channel, got [1, 8]", "batch-of-one"),
        ("RuntimeError: No GPU found on this host", "no-gpu-for-rank"),
        ("RuntimeError: \"mul_cpu\" not implemented for 'Half'", "op-not-implemented"),
        ("RuntimeError: all states must be on the same device", "tensor-mismatch"),
        ("NotImplementedError: Cannot copy out of meta tensor", "meta-tensor"),
        ("OSError: Incorrect path of the vocabulary: /data/vocab", "path-missing"),
        ("ValueError: too many values to unpack (expected 2)", "value-unpack"),
        ("TypeError: '<' not supported between instances of 'float' and 'str'", "number-as-text"),
        ("AssertionError: the tokenizer must be specified", "option-invalid"),
        ("KeyError: 'color'", "key-missing"),
        ("IndexError: list index out of range", "index-range"),
        ("NameError: name 'color' is not defined", "name-missing"),
        ("OSError: AF_UNIX path too long", "temporary-path"),
        ("TypeError: cannot multiply a color", "value-types"),
        ("ValueError: the data of call 9 is broken", "exception"),
    ],
)
def test_an_unknown_error_gets_its_family_and_the_place(error: str, family: str) -> None:
    found = cause(
        "Traceback (most recent call last):",
        '  File "/home/me/project/train.py", line 7, in main',
        "    run()",
        '  File "/env/lib/python3.11/site-packages/lib/x.py", line 1, in check',
        error,
    )
    assert (found.id, found.confidence) == (family, "low")
    assert found.cause.endswith(
        f"{error} (project/train.py:7 in main, raised in lib/x.py:1 in check)"
    )


@pytest.mark.parametrize(
    ("frames", "error", "words"),
    [
        (
            ['  File "data.py", line 4, in read', "    assert len(names) > 3"],
            "AssertionError",
            ("assertion", "AssertionError (`assert len(names) > 3`, data.py:4 in read)"),
        ),
        (
            ['  File "go.py", line 2, in main', '    size = os.environ["TEAM"]'],
            "KeyError: 'team'",
            ("variable-missing", "KeyError: 'team' (go.py:2 in main)"),
        ),
        (
            ['  File "go.py", line 2, in main', "    model.load_state_dict(state['net'])"],
            "KeyError: 'net'",
            ("state-missing", "KeyError: 'net' (go.py:2 in main)"),
        ),
        (
            [
                '  File "go.py", line 2, in <module>',
                "    import colors",
                '  File "/e/lib/python3.11/site-packages/colors/a.py", line 5, in <module>',
                "    tint = base.tint()",
            ],
            "TypeError: tint() takes a shade",
            (
                "import-conflict",
                "TypeError: tint() takes a shade (go.py:2, raised in colors/a.py:5)",
            ),
        ),
    ],
)
def test_the_frames_of_a_traceback_decide_the_family(
    frames: list[str], error: str, words: tuple[str, str]
) -> None:
    found = cause("Traceback (most recent call last):", *frames, error)
    assert (found.id, found.cause.partition(": ")[2]) == words
