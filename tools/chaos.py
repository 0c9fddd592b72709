#!/usr/bin/env python3
"""Disturb one run on a real Slurm until it ends, and compare it with the same run undisturbed.

Brings up a dev cluster, trains a small model on two of its nodes, and meets it with random faults:
preemption by another job, a killed rank, a node without power, a cut link, scancel and resume, a
controller that goes away, a time limit. Then it compares every byte of weights, optimiser and random
generators, every rank's samples, and reads the event log.

    tools/chaos.py --faults 10 --seed 1       (as root; see docs/devcluster.md)
"""

import argparse
import itertools
import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from hpcrun.lifecycle.goodput import Goodput, goodput  # noqa: E402  (found through the path above)
from hpcrun.run.directory import RunDirectory  # noqa: E402
from hpcrun.run.events import Attempt, Event, read_events  # noqa: E402
from hpcrun.run.files import read_json, read_lines  # noqa: E402
from tests import jobs  # noqa: E402
from tests.slurm import cluster  # noqa: E402
from tests.slurm.cluster import SlurmCluster  # noqa: E402

NODES = 2
STEPS_PER_FAULT = 20
# Seconds for whatever is waited for: a start on a machine that is busy with other work takes a minute.
PATIENCE = 300.0
# Slurm warns at its next tick of half a minute where less than this and a minute is left; a cut limit
# leaves one to two minutes.
WARNING_LEAD = 110
LIMIT_MINUTES = 30
# Seconds that a micro-batch takes, and takes while the run is ahead of the faults and has to wait for them.
PACE, SLOW_PACE = 0.02, 0.5

PACED = '''

class Paced(Probe):
    """Computes as fast as the file `pace` says, so that the run lasts until the last fault."""

    def note(self, indices):
        super().note(indices)
        with open(os.path.join(self.config.data.own["log"], self.config.model.own["pace"])) as pace:
            time.sleep(float(pace.read()))
'''


@dataclass(frozen=True)
class Met:
    """A fault that was met: the last step logged before it, and the seconds until the run had moved on."""

    fault: str
    step: int
    detail: str
    recovery: float


class Chaos:
    """One disturbed run and the cluster that it runs on."""

    def __init__(self, slurm: SlurmCluster, faults: int, ranks: int, dice: random.Random) -> None:
        self.slurm, self.ranks, self.dice = slurm, ranks, dice
        self.steps = STEPS_PER_FAULT * (faults + 1)
        self.folder = slurm.shared / "chaos"
        slurm.run(["mkdir", "-p", str(self.folder)])
        self.write("probe.py", jobs.PROBE + PACED)
        self.write("empty.yaml", "{}\n")
        self.write("at-once", "0.0")
        self.run = RunDirectory(self.folder / "runs" / "disturbed")
        self._ceiling = STEPS_PER_FAULT
        self._pace = self._hurried = 0.0

    def write(self, name: str, text: str) -> None:
        """Put a file of the job user's into the folder, in one piece."""
        path = self.folder / name
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").chmod(0o644)
        path.with_suffix(".new").replace(path)

    def hpcrun(self, *arguments: str) -> str:
        """Run the program as the job user."""
        command = [self.slurm.python, "-m", "hpcrun", *arguments]
        env = {"PYTHONPATH": str(REPOSITORY), "XDG_STATE_HOME": str(self.folder)}
        return self.slurm.run(command, cwd=self.folder, env=env, timeout=PATIENCE).stdout

    def submit(self, name: str, pace: str) -> RunDirectory:
        """Submit a run of the probe task on two nodes; ``pace`` names the file that says how fast."""
        settings = jobs.probe_config(
            self.folder,
            **{
                "task": "probe:Paced", "model.pace": pace,
                "job.nodes": NODES, "job.gpus": self.ranks, "job.executor": "slurm",
                "job.time": LIMIT_MINUTES, "job.signal_lead": WARNING_LEAD,
                "train.steps": self.steps, "checkpoint.every": 5,
                # Faults are not the run's own, and may strike before the next commit.
                "restarts.crash": None, "restarts.node_failure": None, "restarts.no_progress": None,
                # The nodes are blameless here.
                "job.exclude_after": None,
            },
        )  # fmt: skip
        self.hpcrun(
            "submit", "-c", "empty.yaml", "--name", name, "--detach", "--no-snapshot", *settings
        )
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
        if not self.run.metrics.exists():
            return 0
        with self.run.metrics.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            whole = log.read().rpartition(b"\n")[0]
        return int(json.loads(whole.splitlines()[-1])["step"]) if whole else 0

    def ends(self) -> list[str]:
        """The causes of all attempts' ends."""
        return [str(event.cause) for event in read_events(self.run) if event.what == "ended"]

    def ended(self) -> bool:
        """Whether the run has its final word."""
        result = read_json(self.run.result)
        return result is not None and result.get("state") in ("finished", "failed")

    def wait(self, what: Callable[[], bool], why: str) -> None:
        """Wait until ``what`` is true, and keep the run from ending before that.

        Raises:
            AssertionError: it has ended all the same, or ``what`` did not come.
        """

        def come() -> bool:
            self._keep_pace()
            if what():
                return True
            assert not self.ended(), f"{why}: the run has ended\n{self.story()}"
            return False

        self.slurm.wait_until(come, PATIENCE, lambda: f"{why}\n{self.story()}")

    def _keep_pace(self) -> None:
        pace = PACE if self.step() < self._ceiling else SLOW_PACE
        if pace != self._pace:
            self._pace = pace
            self.write("pace", str(pace))

    def allow(self, faults: int) -> None:
        """Let the run go on at full speed until its part for so many faults is done."""
        self._ceiling = STEPS_PER_FAULT * faults
        self._keep_pace()

    def story(self, run: RunDirectory | None = None) -> str:
        """What there is to read about a run (the disturbed one), for a failure's report."""
        run = run or self.run
        logs = sorted(run.logs.rglob("*.log"), key=lambda path: path.stat().st_mtime)[-4:]
        told = [f"--- {log}\n{log.read_text(errors='replace')[-2000:]}" for log in logs]
        events = run.events.read_text().splitlines()[-12:] if run.events.exists() else []
        return "\n".join([*events, *told, self.slurm.admin("squeue", "--states=all")])

    def starts_again(self) -> bool:
        """Whether an attempt is under way, once its requeued job is told not to wait.

        Slurm holds a requeued job back until its old credential has expired: nobody here has that much
        time, and users need not either (scontrol(1), StartTime).
        """
        lives = [event for event in read_events(self.run) if event.what in ("started", "ended")]
        if lives[-1].what == "started":
            return True
        if time.monotonic() > self._hurried + 1.0:
            self._hurried = time.monotonic()
            shown = self.slurm.scontrol_show_job(self.job())
            if (shown["JobState"], shown["Reason"]) == ("PENDING", "BeginTime"):
                self.slurm.admin("scontrol", "update", f"jobid={self.job()}", "StartTime=now")
        return False

    def wait_for_end(self, ends: int) -> None:
        """Wait until more than ``ends`` attempts have ended; a dead one's end, its successor writes."""
        self.wait(lambda: len(self.ends()) > ends, "no attempt has ended")


def preempt(chaos: Chaos) -> str:
    """Let a job of the urgent partition take all nodes for a moment."""
    ends = len(chaos.ends())
    nodes = len(chaos.slurm.nodes)
    chaos.slurm.sbatch(
        *("-p", "urgent", f"-N{nodes}", "--exclusive", "--output=/dev/null"), "--wrap", "sleep 0.5"
    )
    chaos.wait_for_end(ends)
    return "by a job of partition urgent"


def kill_rank(chaos: Chaos) -> str:
    """SIGKILL one rank."""
    ends = len(chaos.ends())
    node = chaos.dice.choice(chaos.nodes())
    victims = [pid for pid in chaos.slurm.processes(node) if jobs.is_rank(pid)]
    os.kill(chaos.dice.choice(sorted(victims)), signal.SIGKILL)
    chaos.wait_for_end(ends)
    return f"on {node}"


def kill_node(chaos: Chaos) -> str:
    """Take the power from one node of the job."""
    ends = len(chaos.ends())
    node = chaos.dice.choice(chaos.nodes())
    chaos.slurm.kill_node(node)
    try:
        chaos.wait_for_end(ends)
    finally:
        chaos.slurm.revive_node(node)
    return node


def cut_link(chaos: Chaos) -> str:
    """Pull the cable of one node of the job; its processes live on."""
    ends = len(chaos.ends())
    node = chaos.dice.choice(chaos.nodes())
    chaos.slurm.cut_link(node)
    try:
        chaos.wait_for_end(ends)
    finally:
        chaos.slurm.restore_link(node)
        chaos.slurm.revive_node(node)
    return node


def cancel_and_resume(chaos: Chaos) -> str:
    """scancel by the user, who changes his mind."""
    chaos.hpcrun("cancel", "disturbed")
    chaos.hpcrun("resume", "disturbed", "--detach")
    return f"now job {chaos.job()}"


def stop_controller(chaos: Chaos) -> str:
    """slurmctld goes away for some seconds; running jobs must not notice."""
    at, seconds = chaos.step(), chaos.dice.randint(2, 10)
    chaos.slurm.stop_daemon("slurmctld")
    try:
        chaos.wait(lambda: chaos.step() >= at + 5, "the run did not go on without slurmctld")
        time.sleep(seconds)
    finally:
        chaos.slurm.start_daemon("slurmctld")
    return f"for {seconds} s and more"


def time_limit(chaos: Chaos) -> str:
    """Shorten the job's limit so that it is near."""
    ends, job = len(chaos.ends()), chaos.job()
    shown = chaos.slurm.scontrol_show_job(job)
    hours, minutes, seconds = map(int, shown["RunTime"].rpartition("-")[2].split(":"))
    limit = (hours * 3600 + minutes * 60 + seconds) // 60 + 2
    chaos.slurm.admin("scontrol", "update", f"jobid={job}", f"TimeLimit={limit}")
    chaos.wait_for_end(ends)
    chaos.slurm.admin("scontrol", "update", f"jobid={job}", f"TimeLimit={LIMIT_MINUTES}")
    return f"{limit} min"


@dataclass(frozen=True)
class Fault:
    """What strikes, and the cause that the event log has to give for the end (None: there is no end)."""

    strike: Callable[[Chaos], str]
    cause: str | None


FAULTS: dict[str, Fault] = {
    "preempt": Fault(preempt, "preemption"),
    "kill a rank": Fault(kill_rank, "crash"),
    "kill a node": Fault(kill_node, "node-failure"),
    "cut a link": Fault(cut_link, "node-failure"),
    "scancel, resume": Fault(cancel_and_resume, "cancelled"),
    "stop slurmctld": Fault(stop_controller, None),
    "time limit": Fault(time_limit, "time-limit"),
}


@dataclass(frozen=True)
class Planned:
    """A fault to come, and the step from which it may strike."""

    fault: str
    step: int


def plan(faults: int, dice: random.Random) -> list[Planned]:
    """Which faults, in which order, when: every kind comes up before one comes up again."""
    order: list[str] = []
    while len(order) < faults:
        order += dice.sample(list(FAULTS), len(FAULTS))
    return [
        Planned(name, STEPS_PER_FAULT * number + dice.randint(1, STEPS_PER_FAULT // 2))
        for number, name in enumerate(order[:faults])
    ]


def disturb(chaos: Chaos, plan: list[Planned]) -> list[Met]:
    """Meet the run with the faults of the plan, and say each on a line."""
    met: list[Met] = []
    for number, planned in enumerate(plan, start=1):
        chaos.allow(number)
        last = _meet(chaos, planned)
        print(
            f"fault {number:>3}: {last.fault:<16} at step {last.step:>5}, moved on after "
            f"{last.recovery:5.1f} s  ({last.detail})",
            flush=True,
        )
        met.append(last)
    return met


def _meet(chaos: Chaos, planned: Planned) -> Met:
    chaos.wait(lambda: chaos.step() >= planned.step, f"step {planned.step} was not reached")
    fault = FAULTS[planned.fault]
    at, begun, ends = chaos.step(), time.monotonic(), len(chaos.ends())
    detail = fault.strike(chaos)
    # Beyond what it had: steps that are computed again are not yet progress.
    had = chaos.step()
    if fault.cause is not None:
        chaos.wait(chaos.starts_again, "the run did not start again")
    chaos.wait(lambda: chaos.step() > had, "the run did not get further")
    causes = chaos.ends()[ends:]
    expected = [] if fault.cause is None else [fault.cause]
    assert causes == expected, f"{planned.fault}: the log says {causes}\n{chaos.story()}"
    return Met(planned.fault, at, detail, time.monotonic() - begun)


def verify(chaos: Chaos, reference: RunDirectory) -> dict[str, str]:
    """Compare the disturbed run with the undisturbed one; raises AssertionError where they differ."""
    result = read_json(chaos.run.result) or {}
    assert result.get("state") == "finished", f"{result}\n{chaos.story()}"
    assert jobs.final_state(chaos.run) == jobs.final_state(reference), "the final states differ"
    for rank in range(NODES * chaos.ranks):
        calm = jobs.samples_by_step(reference, chaos.folder, rank, accumulation=2)
        rough = jobs.samples_by_step(chaos.run, chaos.folder, rank, accumulation=2)
        assert sorted(calm) == list(range(chaos.steps))
        assert rough == calm, f"rank {rank} saw other samples"
    events = read_events(chaos.run)
    opened = [event.attempt for event in events if event.what == "opened"]
    ended = [event.attempt for event in events if event.what == "ended"]
    assert len(set(opened)) == len(opened), "an attempt was opened twice"
    assert sorted(map(str, opened)) == sorted(map(str, ended)), "not each attempt has one end"
    steps = read_lines(chaos.run.metrics)
    account = goodput(events, time.time())
    _check_account(account, result, events, [float(line["time"]) for line in steps])
    return {
        "attempts": str(len(opened)),
        "steps computed": f"{len(steps)} for {chaos.steps}",
        "wall": f"{account.wall:.0f} s",
        "productive (ETTR)": f"{100 * (account.ettr or 0):.0f} %",
        **{name: f"{value:.0f} s" for name, value in vars(account).items()},
    }


def _check_account(
    account: Goodput, result: dict[str, object], events: Sequence[Event], steps: list[float]
) -> None:
    """The parts add up to the wall time, and hold the time in which steps were seen to be computed.

    ``steps`` are the Unix times at which steps were logged.
    """
    wall = events[-1].time - events[0].time
    assert abs(account.wall - wall) < 1.0, f"{account} does not add up to {wall}"
    assert result["goodput"] == account.as_record(), "result.json has another account"
    begun: dict[Attempt, float] = {}
    for event in events:
        if event.what == "started" and event.attempt is not None:
            begun[event.attempt] = event.time
    seen = 0.0
    borders = [*sorted(begun.values()), float("inf")]
    for start, following in itertools.pairwise(borders):
        seen += max([time - start for time in steps if start <= time < following], default=0.0)
    computing = account.productive + account.checkpoint + account.recomputed
    assert computing > 0.95 * seen, f"steps were computed for {seen:.0f} s: {account}"


def table(met: list[Met]) -> str:
    """How often each fault was met, and how long the run took to be further than before."""
    lines = [f"  {'fault':<16} {'times':>5} {'mean':>8} {'longest':>8}"]
    for name in FAULTS:
        took = [one.recovery for one in met if one.fault == name]
        if took:
            mean, longest = sum(took) / len(took), max(took)
            lines.append(f"  {name:<16} {len(took):>5} {mean:>6.1f} s {longest:>6.1f} s")
    return "\n".join(lines)


def run(slurm: SlurmCluster, faults: int, ranks: int, seed: int) -> None:
    """Train undisturbed, train disturbed, compare, and print; raises AssertionError on a difference."""
    dice = random.Random(seed)
    planned = plan(faults, dice)
    chaos = Chaos(slurm, faults, ranks, dice)
    reference = chaos.submit("undisturbed", "at-once")
    _wait_for_account(chaos, reference, PATIENCE + chaos.steps)
    print(f"undisturbed: {chaos.steps} steps on {NODES} x {ranks} ranks", flush=True)
    chaos.allow(1)
    chaos.submit("disturbed", "pace")
    met = disturb(chaos, planned)
    chaos.allow(faults + 1)
    _wait_for_account(chaos, chaos.run, PATIENCE)
    figures = verify(chaos, reference)
    print(table(met))
    for key, value in figures.items():
        print(f"  {key:<18} {value}")
    print(f"seed {seed}: {faults} faults, not a bit and not a sample of difference")


def _wait_for_account(chaos: Chaos, run: RunDirectory, patience: float) -> None:
    """Wait until the batch script has put the account of the run's time into result.json."""
    job = [event.attempt.job for event in read_events(run) if event.attempt][-1]
    deadline = time.monotonic() + patience
    while (read_json(run.result) or {}).get("goodput") is None:
        failed = chaos.slurm.state(job) in cluster.FINAL_STATES - {"COMPLETED"}
        assert not failed, f"job {job} has failed\n{chaos.story(run)}"
        assert time.monotonic() < deadline, f"no end in {patience:.0f} s\n{chaos.story(run)}"
        time.sleep(1.0)


def main() -> int:
    """Run the whole thing; 0 when the disturbed run equals the undisturbed one."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--faults", type=int, default=10, metavar="N", help="how many (default 10)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the faults' order")
    parser.add_argument("--ranks", type=int, default=2, metavar="R", help="per node (default 2)")
    parser.add_argument("--keep", action="store_true", help="leave the cluster up at the end")
    wanted = parser.parse_args()
    why_not = cluster.why_not()
    if why_not is not None:
        print(f"chaos: {why_not}", file=sys.stderr)
        return 2
    # A terminated tool takes its cluster down too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    name = f"chaos-{os.getpid()}"
    slurm = cluster.start(name, nodes=4, grace_s=5)
    try:
        run(slurm, wanted.faults, wanted.ranks, wanted.seed)
    except AssertionError as failure:
        print(f"chaos: seed {wanted.seed}: {failure}", file=sys.stderr)
        return 1
    finally:
        if not wanted.keep:
            cluster.stop(name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
