"""The run that is disturbed: submitted, watched, and kept from ending before the last fault."""

from __future__ import annotations

import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

from devclusterlib import cluster as devcluster
from devclusterlib.errors import CommandFailed

from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import read_events
from hpcrun.run.io.files import read_json
from tests import jobs
from tests.slurm.cluster import FINAL_STATES, SlurmCluster

REPOSITORY = Path(__file__).resolve().parents[2]
NODES = 2
STEPS_PER_FAULT = 12
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


class Chaos:
    """One disturbed run and the cluster that it runs on."""

    def __init__(self, slurm: SlurmCluster, faults: int, ranks: int, dice: random.Random) -> None:
        self.slurm, self.ranks, self.dice = slurm, ranks, dice
        # Room for the steps that it gets ahead while a fault takes its time.
        self.steps = STEPS_PER_FAULT * (faults + 5)
        self.folder = slurm.shared / "chaos"
        slurm.run(["mkdir", "-p", str(self.folder)])
        self.write("probe.py", jobs.PROBE + PACED)
        self.write("empty.yaml", "{}\n")
        self.write("at-once", "0.0")
        self.run = RunDirectory(self.folder / "runs" / "disturbed")
        self._ceiling = STEPS_PER_FAULT
        self._pace = self._looked = 0.0
        self._held = False

    def write(self, name: str, text: str) -> None:
        """Put a file of the job user's into the folder, in one piece."""
        path = self.folder / name
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").chmod(0o644)
        path.with_suffix(".new").replace(path)

    def hpcrun(self, *arguments: str) -> str:
        """Run the program as the job user."""
        command = [self.slurm.python, "-m", "hpcrun", *arguments]
        # One thread a rank: on a busy machine several wait for each other more than they compute.
        env = {
            **{"PYTHONPATH": str(REPOSITORY), "XDG_STATE_HOME": str(self.folder)},
            "OMP_NUM_THREADS": "1",
        }
        return self.slurm.run(command, cwd=self.folder, env=env, timeout=PATIENCE).stdout

    def submit(self, name: str, pace: str, save_every: int) -> RunDirectory:
        """Submit a run of the probe task on two nodes; ``pace`` names the file that says how fast."""
        settings = jobs.probe_config(
            self.folder,
            **{
                "task": "probe:Paced", "model.pace": pace,
                "job.nodes": NODES, "job.gpus": self.ranks, "job.executor": "slurm",
                "job.time": LIMIT_MINUTES, "job.signal_lead": WARNING_LEAD,
                "train.steps": self.steps, "checkpoint.every": save_every,
                # Half of it, and ranks that a cut link parts give up.
                "train.timeout": 60,
                # Faults are not the run's own, and may strike before the next commit.
                "restarts.crash": None, "restarts.node_failure": None, "restarts.hang": None,
                "restarts.no_progress": None,
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
        try:
            queue = self.slurm.admin("squeue", "--states=all")
        except CommandFailed as failure:
            # The controller may be the one that is away.
            queue = str(failure)
        return "\n".join([*events, *told, queue])

    def is_running(self) -> bool:
        """Whether Slurm and the run agree that an attempt is under way."""
        lives = [
            event.what for event in read_events(self.run) if event.what in ("started", "ended")
        ]
        return lives[-1:] == ["started"] and self.slurm.state(self.job()) == "RUNNING"

    def has_all_nodes(self) -> bool:
        """Whether Slurm has all nodes; those it has lost patience with, and with them perhaps the run's,
        it is given back, as an administrator does.
        """
        states = devcluster.node_states(self.slurm.handle)
        for node, state in states.items():
            if state.startswith(("down", "drain")):
                self.slurm.resume_node(node)
        return bool(states) and all(
            state.startswith(("idle", "alloc", "mix")) and devcluster.registered(state)
            for state in states.values()
        )

    def starts_again(self) -> bool:
        """Whether an attempt is under way, once its requeued job is told not to wait.

        Slurm holds a requeued job back until its old credential has expired: nobody here has that much
        time, and users need not either (scontrol(1), StartTime).
        """
        lives = [event for event in read_events(self.run) if event.what in ("started", "ended")]
        if lives[-1].what == "started":
            return True
        if time.monotonic() > self._looked + 2.0:
            self._looked = time.monotonic()
            shown = self.slurm.scontrol_show_job(self.job())
            held = (shown["JobState"], shown["Reason"]) == ("PENDING", "BeginTime")
            # Not at once: a node that still clears up after the old start loses the new one's script.
            if held and self._held:
                self.slurm.admin("scontrol", "update", f"jobid={self.job()}", "StartTime=now")
            self._held = held and not self._held
        return False

    def wait_for_end(self, ends: int) -> None:
        """Wait until more than ``ends`` attempts have ended; a dead one's end, its successor writes."""
        self.wait(lambda: len(self.ends()) > ends, "no attempt has ended")

    def wait_for_account(self, run: RunDirectory, patience: float) -> None:
        """Wait until the batch script has put the account of the run's time into result.json."""
        job = [event.attempt.job for event in read_events(run) if event.attempt][-1]
        deadline = time.monotonic() + patience
        while (read_json(run.result) or {}).get("goodput") is None:
            failed = self.slurm.state(job) in FINAL_STATES - {"COMPLETED"}
            assert not failed, f"job {job} has failed\n{self.story(run)}"
            assert time.monotonic() < deadline, f"no end in {patience:.0f} s\n{self.story(run)}"
            time.sleep(1.0)
