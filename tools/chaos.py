#!/usr/bin/env python3
"""Disturb one run on a real Slurm until it ends, and compare it with the same run undisturbed.

Brings up a dev cluster, trains a small model on two of its nodes, and meets it with random faults:
preemption by another job, a killed rank, a node without power, a cut link, scancel and resume, a
controller that goes away, a time limit. Then it compares every byte of weights, optimiser and random
generators, every rank's samples, and reads the event log.

    tools/chaos.py --faults 10 --seed 1       (as root; see docs/devcluster.md)
"""

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from hpcrun.lifecycle.goodput import goodput  # noqa: E402  (found through the path above)
from hpcrun.run.directory import RunDirectory  # noqa: E402
from hpcrun.run.events import read_events  # noqa: E402
from hpcrun.run.files import read_json, read_lines  # noqa: E402
from tests import jobs  # noqa: E402
from tests.slurm import cluster  # noqa: E402
from tests.slurm.cluster import SlurmCluster  # noqa: E402

NODES, RANKS = 2, 2
STEPS_PER_FAULT = 40
PATIENCE = 240.0
# What the run has left of its limit when a fault shortens it, and how far ahead it is warned.
WARNING_LEAD = 45


@dataclass(frozen=True)
class Met:
    """A fault that was met: the step at which it struck and the seconds until the run had moved on."""

    fault: str
    step: int
    detail: str
    recovery: float


class Chaos:
    """One disturbed run and the cluster that it runs on."""

    def __init__(self, slurm: SlurmCluster, faults: int, dice: random.Random) -> None:
        self.slurm, self.dice = slurm, dice
        self.steps = STEPS_PER_FAULT * (faults + 1)
        self.folder = slurm.shared / "chaos"
        slurm.run(["mkdir", "-p", str(self.folder)])
        slurm.run(["tee", str(self.folder / "probe.py")], stdin=jobs.PROBE)
        slurm.run(["tee", str(self.folder / "empty.yaml")], stdin="{}\n")
        self.run = RunDirectory(self.folder / "runs" / "disturbed")

    def hpcrun(self, *arguments: str) -> str:
        """Run the program as the job user."""
        command = [self.slurm.python, "-m", "hpcrun", *arguments]
        return self.slurm.run(command, cwd=self.folder, timeout=PATIENCE).stdout

    def submit(self, name: str, pause: float) -> RunDirectory:
        """Submit a run of the probe task on two nodes."""
        settings = jobs.probe_config(
            self.folder,
            **{
                "job.nodes": NODES, "job.gpus": RANKS, "job.executor": "slurm",
                "job.time": "30:00", "job.signal_lead": WARNING_LEAD,
                "train.steps": self.steps, "model.pause": pause,
                "restarts.crash": 1000, "restarts.node_failure": 1000,
                # The nodes are blameless here.
                "job.exclude_after": None,
            },
        )  # fmt: skip
        self.hpcrun("submit", "-c", "empty.yaml", "--name", name, "--detach", *settings)
        return RunDirectory(self.folder / "runs" / name)

    def job(self) -> str:
        """The id of the job that has the run now."""
        told = [event for event in read_events(self.run) if event.attempt is not None]
        assert told[-1].attempt is not None
        return told[-1].attempt.job

    def nodes(self) -> list[str]:
        """The nodes of the job, in Slurm's order."""
        shown = self.slurm.scontrol_show_job(self.job())
        listed = self.slurm.admin("scontrol", "show", "hostnames", shown["NodeList"])
        return listed.split()

    def step(self) -> int:
        """The last step that the run has logged."""
        lines = read_lines(self.run.metrics)
        return int(lines[-1]["step"]) if lines else 0

    def attempts(self) -> int:
        """How many attempts have begun."""
        return sum(event.what == "started" for event in read_events(self.run))

    def ended(self) -> bool:
        """Whether the run has its final word."""
        result = read_json(self.run.result)
        return result is not None and result.get("state") in ("finished", "failed")

    def wait(self, what: Callable[[], bool], why: str) -> None:
        """Wait until ``what`` is true, or the run has ended too early to get there."""
        self.slurm.wait_until(
            lambda: what() or self.ended(), PATIENCE, lambda: f"{why}\n{self.story()}"
        )

    def story(self) -> str:
        """The end of the event log, for a failure's report."""
        return "\n".join(self.run.events.read_text().splitlines()[-12:])

    def wait_for_restart(self, before: int) -> None:
        """Wait until an attempt has begun beyond the ``before`` ones."""
        self.wait(lambda: self.attempts() > before, "the run did not start again")


def preempt(chaos: Chaos) -> str:
    """Let a job of the urgent partition take all nodes for a moment."""
    before = chaos.attempts()
    nodes = len(chaos.slurm.nodes)
    chaos.slurm.sbatch("-p", "urgent", f"-N{nodes}", "--exclusive", "--wrap", "srun sleep 1")
    chaos.wait_for_restart(before)
    return "by a job of partition urgent"


def kill_rank(chaos: Chaos) -> str:
    """SIGKILL one rank."""
    before = chaos.attempts()
    node = chaos.dice.choice(chaos.nodes())
    victims = [pid for pid in chaos.slurm.processes(node) if jobs.is_rank(pid)]
    victim = chaos.dice.choice(sorted(victims))
    os.kill(victim, signal.SIGKILL)
    chaos.wait_for_restart(before)
    return f"one of {len(victims)} ranks on {node}"


def kill_node(chaos: Chaos) -> str:
    """Take the power from one node of the job."""
    before = chaos.attempts()
    node = chaos.dice.choice(chaos.nodes())
    chaos.slurm.kill_node(node)
    chaos.wait_for_restart(before)
    chaos.slurm.revive_node(node)
    return node


def cut_link(chaos: Chaos) -> str:
    """Pull the cable of one node of the job; its processes live on."""
    before = chaos.attempts()
    node = chaos.dice.choice(chaos.nodes())
    chaos.slurm.cut_link(node)
    try:
        chaos.wait_for_restart(before)
    finally:
        chaos.slurm.restore_link(node)
        chaos.slurm.revive_node(node)
    return node


def cancel_and_resume(chaos: Chaos) -> str:
    """scancel by the user, who changes his mind."""
    before = chaos.attempts()
    chaos.hpcrun("cancel", "disturbed")
    chaos.hpcrun("resume", "disturbed", "--detach")
    chaos.wait_for_restart(before)
    return f"now job {chaos.job()}"


def stop_controller(chaos: Chaos) -> str:
    """slurmctld goes away for some seconds; running jobs must not notice."""
    at, seconds = chaos.step(), chaos.dice.randint(2, 10)
    chaos.slurm.stop_daemon("slurmctld")
    chaos.wait(lambda: chaos.step() >= at + 5, "the run did not go on without slurmctld")
    time.sleep(seconds)
    chaos.slurm.start_daemon("slurmctld")
    return f"for about {seconds} s"


def time_limit(chaos: Chaos) -> str:
    """Shorten the job's limit so that it is near."""
    before, job = chaos.attempts(), chaos.job()
    shown = chaos.slurm.scontrol_show_job(job)
    hours, minutes, seconds = map(int, shown["RunTime"].rpartition("-")[2].split(":"))
    limit = (hours * 3600 + minutes * 60 + seconds) // 60 + 2
    chaos.slurm.admin("scontrol", "update", f"jobid={job}", f"TimeLimit={limit}")
    chaos.wait_for_restart(before)
    chaos.slurm.admin("scontrol", "update", f"jobid={chaos.job()}", "TimeLimit=30")
    return f"{limit} min"


FAULTS: dict[str, Callable[[Chaos], str]] = {
    "preempt": preempt,
    "kill a rank": kill_rank,
    "kill a node": kill_node,
    "cut a link": cut_link,
    "scancel, resume": cancel_and_resume,
    "stop slurmctld": stop_controller,
    "time limit": time_limit,
}


def disturb(chaos: Chaos, faults: int) -> list[Met]:
    """Meet the run with ``faults`` faults, each at a step of its own, and say each on a line."""
    met: list[Met] = []
    # Every kind comes up before one comes up again, in an order that the seed decides.
    order: list[str] = []
    for number in range(faults):
        if not order:
            order = list(FAULTS)
            chaos.dice.shuffle(order)
        name = order.pop()
        strike = STEPS_PER_FAULT * number + chaos.dice.randint(5, STEPS_PER_FAULT)
        chaos.wait(lambda strike=strike: chaos.step() >= strike, f"step {strike} was not reached")  # type: ignore[misc]
        if chaos.ended():
            raise AssertionError(f"the run ended before fault {number + 1}\n{chaos.story()}")
        at, begun = chaos.step(), time.monotonic()
        detail = FAULTS[name](chaos)
        chaos.wait(lambda at=at: chaos.step() > at, "the run did not get further")  # type: ignore[misc]
        met.append(Met(name, at, detail, time.monotonic() - begun))
        last = met[-1]
        print(
            f"fault {number + 1:>3}: {last.fault:<16} at step {last.step:>5}, moved on after "
            f"{last.recovery:5.1f} s  ({last.detail})",
            flush=True,
        )
    return met


def verify(chaos: Chaos, reference: RunDirectory) -> dict[str, str]:
    """Compare the disturbed run with the undisturbed one; raises AssertionError where they differ."""
    result = read_json(chaos.run.result) or {}
    assert result.get("state") == "finished", f"{result}\n{chaos.story()}"
    assert jobs.final_state(chaos.run) == jobs.final_state(reference), "the final states differ"
    for rank in range(NODES * RANKS):
        calm = jobs.samples_by_step(reference, chaos.folder, rank, accumulation=2)
        rough = jobs.samples_by_step(chaos.run, chaos.folder, rank, accumulation=2)
        assert sorted(calm) == list(range(chaos.steps))
        assert rough == calm, f"rank {rank} saw other samples"
    events = read_events(chaos.run)
    opened = [event.attempt for event in events if event.what == "opened"]
    ended = [event.attempt for event in events if event.what == "ended"]
    assert len(set(opened)) == len(opened), "an attempt was opened twice"
    assert set(opened) == set(ended), "an attempt has no end"
    account = goodput(events, time.time())
    wall = events[-1].time - events[0].time
    assert abs(account.wall - wall) < 0.01 * wall + 1.0, f"{account} does not add up to {wall}"
    steps = sum(1 for _ in read_lines(chaos.run.metrics))
    return {
        "attempts": str(len(opened)),
        "steps computed": f"{steps} for {chaos.steps}",
        "wall": f"{wall:.0f} s",
        "productive (ETTR)": f"{100 * (account.ettr or 0):.0f} %",
        **{name: f"{value:.0f} s" for name, value in vars(account).items()},
    }


def main() -> int:
    """Run the whole thing; 0 when the disturbed run equals the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=10, metavar="N", help="how many (default 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the faults' order")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up at the end")
    wanted = parser.parse_args()
    why_not = cluster.why_not()
    if why_not is not None:
        print(f"chaos: {why_not}", file=sys.stderr)
        return 2
    name = f"chaos-{os.getpid()}"
    slurm = cluster.start(name, nodes=4, grace_s=5)
    try:
        chaos = Chaos(slurm, wanted.faults, random.Random(wanted.seed))
        reference = chaos.submit("undisturbed", pause=0.0)
        slurm.wait_until(
            lambda: (read_json(reference.result) or {}).get("goodput") is not None, PATIENCE
        )
        print(f"undisturbed: {chaos.steps} steps on {NODES} x {RANKS} ranks", flush=True)
        chaos.submit("disturbed", pause=0.03)
        disturb(chaos, wanted.faults)
        chaos.wait(chaos.ended, "the run did not end")
        slurm.wait_until(
            lambda: (read_json(chaos.run.result) or {}).get("goodput") is not None, PATIENCE
        )
        for key, value in verify(chaos, reference).items():
            print(f"  {key:<18} {value}")
        print(
            f"seed {wanted.seed}: {wanted.faults} faults, not a bit and not a sample of difference"
        )
    except AssertionError as failure:
        print(f"chaos: seed {wanted.seed}: {failure}", file=sys.stderr)
        return 1
    finally:
        if not wanted.keep:
            cluster.stop(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
