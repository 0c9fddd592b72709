"""The first cause is reported, and the failures that follow from it are counted."""

import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpcrun.diagnose.causes import Diagnosis, blames_node, first_cause
from hpcrun.run.endings import (
    Exit,
    Failure,
    Hang,
    is_cascade,
    last_words,
    read_hang,
    record_hang,
    stacks_path,
)

_GLOO = "[/pytorch/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:60045"


def failure(rank: int, time: float, kind: str = "ValueError", message: str = "bad") -> Failure:
    """A rank's own record of its failure."""
    return Failure(rank, f"n{rank // 2}", time, kind, message, "task.py:7", 12, "Traceback …")


def killed(rank: int, time: float, number: int = 9, induced: bool = False) -> Exit:
    """A watcher's record of a rank that a signal ended."""
    return Exit(rank, f"n{rank // 2}", time, None, number, induced)


def cause(*args: Any, **named: Any) -> Diagnosis:
    found = first_cause(*args, **named)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("kind", "message", "about_a_peer"),
    [
        ("RuntimeError", _GLOO, True),
        ("RuntimeError", "[gloo/transport/tcp/pair.cc:534] Connection reset by peer", True),
        ("DistBackendError", "NCCL error: remote process exited or there was an error", True),
        ("DistBackendError", "NCCL communicator was aborted on rank 3.", True),
        ("DistNetworkError", "The client socket has timed out after 60000ms", True),
        ("DistStoreError", "Socket Timeout", True),
        ("BrokenPipeError", "[Errno 32] Broken pipe", True),
        ("ValueError", "the data of call 9 is broken", False),
        ("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB", False),
        ("FileNotFoundError", "[Errno 2] No such file or directory: 'data.h5'", False),
        ("RuntimeError", "CUDA error: device-side assert triggered", False),
    ],
)
def test_only_errors_about_a_peer_are_a_cascade(
    kind: str, message: str, about_a_peer: bool
) -> None:
    assert is_cascade(failure(0, 1.0, kind, message)) is about_a_peer


def test_the_own_error_is_the_cause_before_an_older_peer() -> None:
    told = cause(
        [
            failure(0, 1.0, "RuntimeError", _GLOO),
            failure(3, 1.1),
            failure(1, 1.2, "RuntimeError", _GLOO),
        ],
        [],
    )
    assert told.line == "rank 3 on n1: ValueError: bad at task.py:7"
    assert (told.rank, told.host, told.step, told.cascade) == (3, "n1", 12, 2)
    assert told.traceback == "Traceback …"


def test_a_killed_rank_comes_before_those_that_lost_it() -> None:
    told = cause(
        [failure(0, 5.2, "RuntimeError", _GLOO), failure(1, 5.1, "RuntimeError", _GLOO)],
        [killed(2, 5.0, signal.SIGKILL), killed(0, 6.0, induced=True)],
    )
    assert told.line == "rank 2 on n1 was killed by SIGKILL"
    assert (told.rank, told.step, told.cascade) == (2, 12, 2)


def test_a_kill_that_the_watcher_ordered_is_no_cause() -> None:
    assert first_cause([], [killed(1, 1.0, induced=True)]) is None
    told = cause([failure(0, 2.0)], [killed(1, 1.0, induced=True)])
    assert told.rank == 0


# Recorded from torch 2.13: FSDP over gloo, a parameter of one rank without a gradient.
ABORTED = """terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at /pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:456] op.preamble.length <= \
op.nbytes. 324 vs 128. Received data size doesn't match expected size. Is there a distributed collective \
mismatch in your code?
"""


def test_the_last_words_of_c_plus_plus_are_explained(tmp_path: Path) -> None:
    (tmp_path / "rank-00002.log").write_text(
        f"hpcrun: step 1\n{ABORTED}Fatal Python error: Aborted\n"
    )
    told = cause([failure(0, 5.2, "RuntimeError", _GLOO)], [killed(2, 5.0, 6)], logs=tmp_path)
    assert told.line.startswith(
        "rank 2 on n1 was killed by SIGABRT: Received data size doesn't match expected size: ranks came to "
        "different collectives; "
    )
    assert (told.rank, told.cascade) == (2, 1)
    by_srun = cause([], [], "srun: error: n1: task 2: Aborted (core dumped)\n", logs=tmp_path)
    assert by_srun.line == told.line


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "Memory cgroup out of memory: the kernel has killed this rank",
            "Memory cgroup out of memory: the kernel has killed this rank: the kernel killed a process "
            "because memory was full; request more memory (job.mem), ",
        ),
        (
            "the fork server of this node has ended, and this rank (process 7) with it",
            "the fork server of this node has ended, and this rank (process 7) with it",
        ),
    ],
)
def test_the_task_of_a_forked_rank_names_its_end(tmp_path: Path, said: str, told: str) -> None:
    (tmp_path / "rank-00002.log").write_text(f"hpcrun: step 1\nhpcrun: {said}\n")
    words = "srun: error: n1: task 2: Killed\n"
    found = cause([failure(0, 5.2, "RuntimeError", _GLOO)], [], words, logs=tmp_path)
    assert found.line.startswith(f"rank 2 on n1 was killed by SIGKILL: {told}")
    assert blames_node(found)


def test_unknown_words_are_reported_unchanged(tmp_path: Path) -> None:
    log = "terminate called after throwing an instance of 'my::odd'\n  what():  a strange end\n"
    (tmp_path / "rank-00001.log").write_text(log)
    told = cause([], [killed(1, 5.0, 6)], logs=tmp_path)
    assert told.line == "rank 1 on n0 was killed by SIGABRT: my::odd: a strange end"
    assert last_words(tmp_path, 3) is None


def test_a_failure_before_a_kill_is_the_cause() -> None:
    told = cause([failure(0, 1.0)], [killed(1, 2.0)])
    assert told.rank == 0


def test_sruns_words_are_the_cause_where_no_rank_left_any() -> None:
    log = "srun: error: n1: tasks 2-3: Killed\nsrun: error: n0: task 0: Exited with exit code 1\n"
    told = cause([], [], log)
    assert (told.line, told.rank, told.host) == ("task 2-3 on n1: Killed", 2, "n1")
    assert first_cause([], [], "nothing of note") is None


def test_with_only_consequences_recorded_the_earliest_is_reported() -> None:
    told = cause([failure(1, 1.0, "RuntimeError", _GLOO)], [])
    assert told.rank == 1


def test_sruns_line_on_a_silent_task_comes_first() -> None:
    log = (
        "srun: error: node2: task 2: Exited with exit code 1\n"
        "srun: error: node2: task 3: Killed\n"
        "srun: error: node1: tasks 0-1: Exited with exit code 1\n"
    )
    lost = [
        Failure(rank, "node", 1.0, "RuntimeError", "Connection closed by peer", "", 7, "")
        for rank in (0, 1, 2)
    ]
    told = cause(lost, [], log)
    assert told.line == "rank 3 on node2 was killed by SIGKILL"


HANG = Hang(1, "n0", 5.0, 7, "rank 1 on n0 is behind")


def test_a_hang_is_the_cause_of_what_fails_after_it() -> None:
    told = cause([failure(0, 5.1)], [killed(1, 5.2)], hang=HANG)
    assert told.hang
    assert (told.line, told.rank, told.host, told.step) == ("rank 1 on n0 is behind", 1, "n0", 7)


@pytest.mark.parametrize("earlier", [([failure(1, 4.0)], []), ([], [killed(1, 4.0)])])
def test_ranks_that_hang_after_a_lost_rank_are_no_cause(earlier: tuple) -> None:
    told = cause(*earlier, hang=HANG)
    assert not told.hang


def test_a_hang_is_read_back_from_its_record_or_stacks(tmp_path: Path) -> None:
    stacks_path(tmp_path, 0).touch()
    # A link without its file, as a file that its rank removes after the folder was listed.
    stacks_path(tmp_path, 2).symlink_to(tmp_path / "removed")
    assert read_hang(tmp_path) is None
    stacks_path(tmp_path, 1).write_text("Thread 0x1: ...")
    found = read_hang(tmp_path)
    assert found is not None
    assert (found.rank, found.line) == (None, "1 rank made no progress")
    record_hang(tmp_path, HANG)
    assert read_hang(tmp_path) == HANG


# Recorded with Slurm 22.05: rank 0 gave up on rank 1, and srun then killed rank 1.
KILLED_BY_SRUN = (
    "srun: error: node1: task 0: Exited with exit code 1\n"
    "srun: launch/slurm: _step_signal: Terminating StepId=6.0\n"
    "srun: error: node2: task 1: Killed\n"
)


def test_a_rank_killed_by_srun_is_no_cause() -> None:
    told = cause([failure(0, 1.0, "DistStoreError", "wait timeout")], [], KILLED_BY_SRUN)
    assert told.line == "rank 0 on n0: DistStoreError: wait timeout at task.py:7"
    assert told.follows
    assert not blames_node(told)
    alone = cause([], [], KILLED_BY_SRUN)
    assert (alone.line, alone.host) == ("task 0 on node1: Exited with exit code 1", "node1")
    assert first_cause([], [], KILLED_BY_SRUN.partition("\n")[2]) is None


@pytest.mark.parametrize(
    ("line", "host"),
    [
        (
            "Task launch for StepId=12.0 failed on node n2: Communication connection failure",
            "n2",
        ),
        ("Node failure on n2", "n2"),
        ('slurm_set_addr: Unable to resolve "n2"', "n2"),
        ("fwd_tree_thread: can't find address for host n2, check slurm.conf", "n2"),
    ],
)
def test_a_node_where_srun_cannot_launch_is_blamed(line: str, host: str) -> None:
    log = (
        f"srun: error: {line}\nsrun: error: Application launch failed: x\nsrun: Job step aborted\n"
    )
    told = cause([failure(0, 1.0, "DistStoreError", "wait timeout")], [], log)
    assert (told.line, told.host) == (line, host)
    assert blames_node(told)


def test_a_batch_node_that_fails_srun_is_blamed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    said = "srun: error: Unable to confirm allocation for job 5: {}\n"
    told = cause([], [], said.format("Protocol authentication error"))
    assert (told.host, blames_node(told)) == ("n1", True)
    away = cause([], [], said.format("Unable to contact slurm controller (connect failure)"))
    assert not blames_node(away)


def test_a_rank_without_a_record_shows_its_traceback_s_end(
    tmp_path: Path,
) -> None:
    (tmp_path / "rank-00001.log").write_text(
        "Traceback (most recent call last):\n"
        '  File "/x/site.py", line 3, in <module>\n'
        "    import y\n"
        "ImportError: libcudart.so.12: cannot open shared object file\n"
        "more\n"
    )
    log = "srun: error: node2: task 1: {}\nsrun: Terminating StepId=6.0\n"
    told = cause([], [], log.format("Exited with exit code 1"), logs=tmp_path)
    assert told.line == (
        "task 1 on node2: Exited with exit code 1: ImportError: libcudart.so.12: cannot open shared "
        "object file: a shared library is not found on the node; load its module, or install the package "
        "that has it; check LD_LIBRARY_PATH"
    )
    assert not blames_node(told)
    # A killed rank had survived the error that it printed.
    killed_one = cause([], [], log.format("Killed"), logs=tmp_path)
    assert killed_one.line == "rank 1 on node2 was killed by SIGKILL"


def test_a_hopeless_message_is_final_only_before_the_first_step() -> None:
    """After steps with the same input, the cause may be a node."""
    message = 'Error(s) in loading state_dict for Net: Missing key(s) in state_dict: "a"'
    for step, final in ((None, True), (0, True), (12, False)):
        failed = replace(failure(0, 1.0, "RuntimeError", message), step=step)
        told = cause([failed], [])
        assert told.bad_input == final


def test_a_node_that_cannot_start_the_program_is_blamed(
    tmp_path: Path,
) -> None:
    words = "slurmstepd-node2: error: execve(): /opt/python: No such file or directory\n"
    (tmp_path / "rank-00001.log").write_text(words)
    log = "srun: error: node2: task 1: Exited with exit code 2\nsrun: Terminating StepId=6.0\n"
    told = cause([], [], log, logs=tmp_path)
    assert told.line.endswith("execve(): /opt/python: No such file or directory")
    assert (told.host, blames_node(told)) == ("node2", True)
