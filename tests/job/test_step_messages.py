"""Srun's messages pass through the batch step, which ends a step whose ranks do not answer SIGTERM."""

import os
import signal
import subprocess
import threading
from pathlib import Path

import pytest

from hpcrun.job.step_messages import StepMessages
from hpcrun.nodes.kill_ranks import children_of, kill_processes, processes_of
from tests.support import jobs

from .step_substitutes import Desk

ENVIRON = {"SLURM_JOB_ID": "7", "SLURM_CLUSTER_NAME": "one", "SLURMD_NODENAME": "n1"}
TERMINATING = b"srun: Terminating StepId=7.3\n"


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


@pytest.mark.parametrize(
    "line", [TERMINATING, b"srun: launch/slurm: _step_signal: Terminating StepId=7_2.3\n"]
)
def test_a_step_that_does_not_end_is_hastened(line: bytes) -> None:
    asked, come = list[int](), threading.Event()

    def hasten(step: int) -> None:
        asked.append(step)
        come.set()

    messages = StepMessages(hasten, grace=0.0)
    # In two writes, as a pipe may deliver it.
    other = os.dup(messages.descriptor)
    messages.begin()
    os.write(other, b"srun: error: n2: task 3: Killed\n" + line[:9])
    os.write(other, line[9:])
    assert come.wait(60)
    os.close(other)
    messages.finish()
    assert asked == [3]


def test_a_step_that_ends_in_time_is_not_hastened() -> None:
    asked = list[int]()
    messages = StepMessages(asked.append, grace=3600.0)
    other = os.dup(messages.descriptor)
    messages.begin()
    os.write(other, TERMINATING)
    os.close(other)
    messages.finish()
    assert asked == []
    # The thread that would hasten the step has seen the end, too.
    for thread in threading.enumerate():
        if thread is not threading.current_thread() and thread.name.endswith("(_wait)"):
            thread.join(60)
    assert asked == []


BUSY = "srun: Job 7 step creation temporarily disabled, retrying (Requested nodes are busy)\n"


@pytest.mark.parametrize(
    ("lines", "given_up"),
    [
        ([BUSY, BUSY.replace("temporarily", "still")], True),
        ([BUSY.replace("7", "7_2")], True),
        ([BUSY, "srun: Step created for StepId=7.0\n"], False),
        ([BUSY, "srun: Step created for job 7\n"], False),
        ([BUSY.replace("Requested nodes are busy", "Job prolog is running")], False),
        ([BUSY.replace("Requested nodes are busy", "Required ports are busy")], False),
        (["srun: launch of task 1 on host n2 is slow: Requested nodes are busy\n"], False),
    ],
    ids=["busy", "array", "late", "late-on-22.05", "prolog", "ports", "other"],
)
def test_srun_ends_if_the_nodes_stay_busy(lines: list[str], given_up: bool) -> None:
    reasons, passed = list[str](), threading.Event()
    busy = 0.0 if given_up else 3600.0
    messages = StepMessages(lambda _: passed.set(), grace=0.0, give_up=reasons.append, busy=busy)
    other = os.dup(messages.descriptor)
    messages.begin()
    os.write(other, "".join(lines).encode() + TERMINATING)
    assert passed.wait(60)
    timers = [one for one in threading.enumerate() if isinstance(one, threading.Timer)]
    jobs.wait_for(lambda: not any(timer.is_alive() for timer in timers))
    os.close(other)
    messages.finish()
    assert reasons == (["Requested nodes are busy"] if given_up else [])


def test_messages_of_srun_reach_the_batch_log(desk: Desk) -> None:
    desk.answer("srun", "echo to the output; echo one line >&2; printf 'no end' >&2; exit 3")
    desk.step()
    told = desk.told()
    assert "to the output" in told
    assert told.index("one line\nno end") < told.index("hpcrun: crash")


def test_a_background_process_does_not_hold_the_end_up(desk: Desk) -> None:
    held = desk.bin.parent / "pid"
    desk.answer("srun", f"sleep 1000 & echo $! > '{held}'; exit 3")
    assert desk.step() == 0
    os.kill(int(held.read_text()), signal.SIGKILL)


def test_only_processes_of_the_steps_are_killed() -> None:
    mine = ENVIRON | {"SLURM_STEP_ID": "3"}
    others = [mine | {name: "8"} for name in mine]
    sleep = ["sleep", "1000"]
    processes = [subprocess.Popen(sleep, env=os.environ | env) for env in (mine, *others)]
    try:
        assert processes_of([2, 3], ENVIRON) == [processes[0].pid]
        assert kill_processes([2, 3], ENVIRON, None, 60.0) == 0
        assert processes[0].wait(60) == -signal.SIGKILL
        assert [process.poll() for process in processes[1:]] == [None] * len(others)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_forked_rank_counts_until_its_server_reaps_it() -> None:
    server = subprocess.Popen(["sh", "-c", "sleep 1000 & wait"])
    try:
        jobs.wait_for(lambda: len(children_of(server.pid)) == 1)
        (rank,) = children_of(server.pid)
        assert kill_processes([3], ENVIRON, server.pid, 0.0) == 1
        os.kill(rank, signal.SIGKILL)
        assert kill_processes([3], ENVIRON, server.pid, 60.0) == 0
    finally:
        server.kill()
        server.wait()
