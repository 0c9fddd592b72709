"""The nodes of a job that has lost one of them, with real agents and substitutes for Slurm's programs."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator

import psutil
import pytest

from hpcrun.job.ending import conclude
from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.job.srun import BatchJob, RanksEnd
from hpcrun.job.step import start_ranks
from hpcrun.nodes import job_nodes
from hpcrun.nodes.job_nodes import JobNodes
from hpcrun.nodes.step_nodes import JobShape
from hpcrun.run.attempt import Attempt
from tests.nodes.test_watch import NODES, PATIENCE, Several, rank
from tests.support import jobs
from tests.support.journal import record_event

from .step_substitutes import FIRST, Desk

CANCELLED = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:48:15 ***"
LISTED = r"7.0|hpcrun-7-0\n7.1|hpcrun-agents\n7.2|monitor\n7.3|hpcrun-node-setup\n"


@pytest.fixture
def desk(tmp_path, monkeypatch) -> Desk:
    desk = Desk(tmp_path, nodes=2)
    desk.answer("squeue", f"printf '{LISTED}'")
    monkeypatch.setenv("PATH", f"{desk.bin}:{os.environ['PATH']}")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(job_nodes, "begin_agents", Several)
    return desk


@pytest.fixture
def nodes(desk: Desk) -> Iterator[JobNodes]:
    with contextlib.closing(JobNodes(desk.run, FIRST, JobShape(NODES, 2, 1), "node1")) as made:
        yield made


def in_group(process: psutil.Process, group: int) -> bool:
    with contextlib.suppress(OSError):
        return os.getpgid(process.pid) == group
    return False


def test_only_the_steps_of_hpcrun_end_with_a_lost_node(desk: Desk, nodes: JobNodes) -> None:
    nodes.next_step(FIRST)
    environ = {**os.environ, "PATH": "/usr/bin:/bin"}
    # Two commands with the words of an srun; the first is of a user.
    commands = [
        f"bash -c 'sleep 1000; :' srun --job-name={name}" for name in ("mine", "hpcrun-7-0")
    ]
    script = " & ".join(commands)
    with subprocess.Popen(["bash", "-c", script], env=environ, process_group=0) as child:
        try:
            with nodes.watch_step(child):
                nodes.lose("node2", "no heartbeat")
                assert child.wait(PATIENCE) == 128 + signal.SIGKILL
            left = [
                " ".join(one.cmdline()) for one in psutil.process_iter() if in_group(one, child.pid)
            ]
            assert any("--job-name=mine" in words for words in left), left
        finally:
            os.killpg(child.pid, signal.SIGKILL)
    assert desk.called("scancel") == ["scancel 7.0", "scancel 7.3"]


def test_ranks_of_a_lost_step_end_before_the_next_step(desk: Desk, nodes: JobNodes) -> None:
    nodes.next_step(FIRST)
    with contextlib.ExitStack() as stack:
        places = (("node1", 0), ("node1", 3), ("node1", 2), ("node2", 0))
        ranks = [stack.enter_context(rank(*place)) for place in places]
        ended = subprocess.Popen(["true"])
        with nodes.watch_step(ended):
            ended.wait()
        jobs.wait_for(lambda: nodes.end_lost_step() is None)
        assert [one.wait(PATIENCE) for one in ranks[:2]] == [-signal.SIGKILL] * 2
        # A step of the user.
        assert ranks[2].poll() is None
        nodes.lose("node2", "no heartbeat")
        assert nodes.has_lost_step
    desk.answer("squeue", "exit 1")
    assert nodes.end_lost_step() == "the steps of the job are not known"


def test_without_an_agent_no_step_follows_a_lost_step(nodes: JobNodes) -> None:
    nodes.next_step(FIRST)
    nodes.lose("node2", "no heartbeat")
    assert nodes.end_lost_step() == "no agent can end the ranks on node1"


def test_the_setup_of_a_spare_shares_the_node(desk: Desk, nodes: JobNodes) -> None:
    desk.run.config.write_text(
        desk.run.config.read_text().replace("node_setup: []", "node_setup: [cp]")
    )
    nodes.next_step(FIRST)
    open_attempt(desk.run, FIRST, Budgets())
    nodes.lose("node2", "no heartbeat")
    start_ranks(desk.run, FIRST.following, nodes)
    setup, _ = desk.called("srun")
    assert "--nodes=1 --ntasks=1 --ntasks-per-node=1 --nodelist=node3 " in setup
    assert " --overlap --no-kill --immediate=60 " in setup


JOB = "JobId=7 JobState=RUNNING Restarts=0\\n   NodeList=node[1-3]\\n"
SHRUNK = "scontrol update JobId=7 NodeList=node1,node3"
DENIED = "Slurm requeues the job when it notices the loss: "


@pytest.mark.parametrize(
    ("wanted", "shown", "answer", "shrinks", "told"),
    [
        (2, JOB, "", True, ""),
        ("2-3", JOB, "", True, ""),
        # Slurm itself, or the batch step, requeues a job with too few nodes.
        (3, JOB, "", False, ""),
        (2, JOB.replace("1-3", "1,3"), "", False, ""),
        (2, JOB.replace("Restarts=0", "Restarts=1"), "", False, ""),
        (2, JOB.replace("RUNNING", "COMPLETING"), "", False, ""),
        (2, JOB, "echo Not supported >&2; exit 1", True, DENIED + "Not supported"),
        (2, "", "", False, DENIED + "slurm_load_jobs error: Invalid job id specified"),
    ],
    ids=["spare", "range", "too-few", "gone", "newer", "ends", "refused", "unknown"],
)
def test_a_lost_node_leaves_the_job_of_slurm(
    desk: Desk, capfd, wanted, shown, answer, shrinks, told
) -> None:
    show = f"printf '{shown}'" if shown else f"echo '{told.removeprefix(DENIED)}' >&2; exit 1"
    desk.answer("scontrol", f"if [ $1 = show ]; then {show}; else {answer or ':'}; fi")
    shape = JobShape(NODES, wanted, 1)
    with contextlib.closing(JobNodes(desk.run, FIRST, shape, "node1")) as nodes:
        nodes.next_step(FIRST)
        nodes.lose("node2", "no heartbeat")
        nodes.leave_lost_nodes()
    assert (SHRUNK in desk.called("scontrol")) is shrinks
    assert (told in capfd.readouterr().out) is True


def test_a_batch_step_ends_no_step_of_a_newer_start(desk: Desk, nodes: JobNodes) -> None:
    nodes.next_step(FIRST)
    desk.answer("scontrol", f"printf '{JOB.replace('Restarts=0', 'Restarts=1')}'")
    with subprocess.Popen(["sleep", "1000"]) as child, nodes.watch_step(child):
        # The network of this node was cut, and the node hears of no other at first.
        nodes.lose("node2", "no heartbeat")
        child.kill()
        child.wait()
    assert not nodes.has_lost_step
    assert jobs.events(desk.run, "node-lost") == []
    assert desk.called("scancel") == []


def test_too_few_nodes_are_no_failure_of_the_attempt(desk: Desk, nodes: JobNodes) -> None:
    open_attempt(desk.run, FIRST, Budgets())
    record_event(desk.run, "ended", attempt=FIRST, cause="crash", restart_allowed=True)
    nodes.next_step(FIRST)
    for node in NODES[1:]:
        nodes.lose(node, "no heartbeat")
    ranks = start_ranks(desk.run, FIRST.following, nodes)
    assert ranks == RanksEnd(1, started=False)
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    end = conclude(desk.run, BatchJob(FIRST.following), ranks, nodes=nodes)
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    assert (end.code, end.following, desk.ends()) == (0, None, ["crash"])
    assert "scontrol requeue 7" in desk.called("scontrol")


@pytest.mark.parametrize(
    ("told", "before", "cause", "requeues"),
    [
        ("", 0, "node-failure", True),
        # A person's cancellation comes first.
        (f"hpcrun: attempt 7-0 on n1\n{CANCELLED}\n", 0, "cancelled", False),
        # The budget of restarts.node_failure.
        ("", 10, "node-failure", False),
    ],
    ids=["stuck", "cancelled", "too-often"],
)
def test_a_step_that_is_never_created_costs_a_requeue(
    desk: Desk, told: str, before: int, cause: str, requeues: bool
) -> None:
    for number in range(-before, 0):
        earlier = Attempt("7", 0, number)
        record_event(desk.run, "ended", attempt=earlier, cause="node-failure")
    desk.run.batch_log("7").write_text(told)
    ranks = RanksEnd(1, stuck="Requested nodes are busy")
    masked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    end = conclude(desk.run, BatchJob(FIRST), ranks)
    signal.pthread_sigmask(signal.SIG_SETMASK, masked)
    assert (end.following, desk.ends()[-1]) == (None, cause)
    assert ("scontrol requeue 7" in desk.called("scontrol")) is requeues
