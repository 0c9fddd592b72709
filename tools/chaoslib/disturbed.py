"""The disturbed run: submit it, watch it, and hold it back until the last fault."""

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
from hpcrun.run.files import read_json
from hpcrun.run.journal.journal import Journal
from hpcrun.storage.store import CheckpointStore
from tests.on_slurm.cluster import FINAL_STATES, SlurmCluster
from tests.support import jobs

REPOSITORY = Path(__file__).resolve().parents[2]
NODES = 2
STEPS_PER_FAULT = 12
# Seconds for each wait: a start on a busy machine takes a minute.
PATIENCE = 300.0
# Slurm sends the warning at its next tick (30 s) if less than this lead and a minute is left. A cut
# limit leaves one to two minutes.
WARNING_LEAD = 110
LIMIT_MINUTES = 240
ANY_STEP = 1_000_000

# The task slows itself down. The tool could not: it waits for a node while the restarted run continues.
PACED = '''

class Paced(Probe):
    """Computes fast up to the step in the file `pace`, then ten seconds per step, until the file changes."""

    def note(self, indices):
        super().note(indices)
        time.sleep(0.02)
        late = time.monotonic() + 5
        while self.step >= self.allowed() and not STOP.reason and time.monotonic() < late:
            time.sleep(0.1)

    def allowed(self):
        with open(os.path.join(self.config.data.own["log"], self.config.model.own["pace"])) as pace:
            return int(pace.read())
'''


class Chaos:
    """The disturbed run and its cluster.

    Args:
        slurm: the cluster.
        faults: number of faults, which sets the length of the run.
        ranks: ranks per node.
        dice: chooses nodes and moments.
        in_place: restart inside the allocation where that is possible.
        spares: number of spare nodes.
    """

    def __init__(
        self,
        slurm: SlurmCluster,
        faults: int,
        ranks: int,
        dice: random.Random,
        *,
        in_place: bool = True,
        spares: int = 0,
    ) -> None:
        self.slurm, self.ranks, self.dice = slurm, ranks, dice
        self.in_place, self.spares = in_place, spares
        # Extra steps, because training continues during a fault.
        self.steps = STEPS_PER_FAULT * (faults + 5)
        self.folder = slurm.shared / "chaos"
        slurm.run(["mkdir", "-p", str(self.folder)])
        self.write("probe.py", jobs.PROBE + PACED)
        self.write("empty.yaml", "{}\n")
        self.write("at-once", str(ANY_STEP))
        self.write("pace", str(STEPS_PER_FAULT))
        name = "disturbed" if in_place else "requeued"
        self.run = RunDirectory(self.folder / "runs" / name)
        self._looked = 0.0
        self._held = False

    def write(self, name: str, text: str) -> None:
        """Write a file of the job user into the folder, atomically."""
        path = self.folder / name
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").chmod(0o644)
        path.with_suffix(".new").replace(path)

    def hpcrun(self, *arguments: str) -> str:
        """Run hpcrun as the job user and return its output."""
        command = [self.slurm.python, "-m", "hpcrun", *arguments]
        # One thread per rank: on a busy machine several threads mostly wait for each other.
        env = {
            **{"PYTHONPATH": str(REPOSITORY), "XDG_STATE_HOME": str(self.folder)},
            "OMP_NUM_THREADS": "1",
        }
        return self.slurm.run(command, cwd=self.folder, env=env, timeout=PATIENCE).stdout

    def submit(self, name: str, pace: str, save_every: int) -> RunDirectory:
        """Submit a run of the probe task on two nodes; ``pace`` names the file with its last fast step."""
        settings = jobs.probe_config(
            self.folder,
            **{
                "task": "probe:Paced", "model.pace": pace,
                "job.nodes": NODES, "job.gpus": self.ranks, "job.executor": "slurm",
                "job.time": LIMIT_MINUTES, "job.signal_lead": WARNING_LEAD,
                "train.steps": self.steps, "checkpoint.every": save_every,
                # After half of this time, ranks that a cut link separates time out.
                "train.timeout": 60,
                # Injected faults must not use budgets; a fault may come before the next commit.
                "restarts.crash": None, "restarts.node_failure": None, "restarts.hang": None,
                "restarts.no_progress": None, "restarts.same_step": None,
                "restarts.in_place": self.in_place, "job.spares": self.spares,
                # Injected faults must not exclude nodes.
                "job.exclude_after": None,
            },
        )  # fmt: skip
        self.hpcrun(
            "submit", "-c", "empty.yaml", "--name", name, "--detach", "--no-snapshot", *settings
        )
        return RunDirectory(self.folder / "runs" / name)

    def job(self) -> str:
        """Return the id of the run's current job."""
        told = [event for event in Journal(self.run).read().events if event.attempt is not None]
        assert told[-1].attempt is not None
        return told[-1].attempt.job

    def nodes(self) -> list[str]:
        """Return the nodes of the newest attempt, in Slurm's order, without spare nodes."""
        listed = self.slurm.admin("scontrol", "show", "hostnames", str(self._opened("hosts")))
        return listed.split()

    def batch_host(self) -> str:
        """Return the node of the batch step; a pending job has none, and then that of the last rank 0."""
        shown = self.slurm.scontrol_show_job(self.job())
        return shown.get("BatchHost") or str(self._opened("host"))

    def _opened(self, key: str) -> object:
        """Return a field of the newest opened attempt; a pending job has no nodes for Slurm."""
        return [event for event in Journal(self.run).read().events if event.tag == "opened"][
            -1
        ].own[key]

    def step(self) -> int:
        """Return the last step that the run has logged."""
        if not self.run.metrics.exists():
            return 0
        with self.run.metrics.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - 4096))
            whole = log.read().rpartition(b"\n")[0]
        return int(json.loads(whole.splitlines()[-1])["step"]) if whole else 0

    def check_saved(self) -> None:
        """Check every byte of the newest committed step, which must be no older than the event log says.

        Raises:
            AssertionError: it is older.
            CheckpointError: it is damaged.
        """
        logged = Journal(self.run).read().committed or 0
        store = CheckpointStore(self.run.checkpoints, "chaos-0")
        newest = max(store.steps(), default=0)
        assert newest >= logged, (
            f"step {logged} was saved, and {newest} is the newest\n{self.story()}"
        )
        if newest:
            store.check(newest)

    def ends(self) -> list[str]:
        """Return the causes of all ended attempts."""
        return [
            str(event.cause) for event in Journal(self.run).read().events if event.tag == "ended"
        ]

    def ended(self) -> bool:
        """Return True if the run has its result."""
        result = read_json(self.run.result)
        return result is not None and result.get("state") in ("finished", "failed")

    def wait(self, what: Callable[[], bool], why: str) -> None:
        """Wait until ``what`` is true.

        Raises:
            AssertionError: the run has ended, or ``what`` did not become true in time.
        """

        def come() -> bool:
            if what():
                return True
            assert not self.ended(), f"{why}: the run has ended\n{self.story()}"
            return False

        self.slurm.wait_until(come, PATIENCE, lambda: f"{why}\n{self.story()}")

    def allow(self, step: int) -> None:
        """Let the run continue at full speed up to ``step``."""
        self.write("pace", str(step))

    def story(self, run: RunDirectory | None = None) -> str:
        """Return logs, events and queue of a run (default: the disturbed run) for a failure report."""
        run = run or self.run
        logs = sorted(run.logs.rglob("*.log"), key=lambda path: path.stat().st_mtime)[-4:]
        told = [f"--- {log}\n{log.read_text(errors='replace')[-2000:]}" for log in logs]
        events = run.events.read_text().splitlines()[-12:] if run.events.exists() else []
        try:
            queue = self.slurm.admin("squeue", "--states=all")
        except CommandFailed as failure:
            # The controller may be stopped by a fault.
            queue = str(failure)
        return "\n".join([*events, *told, queue])

    def is_running(self) -> bool:
        """Return True if Slurm and the event log both show a running attempt."""
        histories = [
            event.tag
            for event in Journal(self.run).read().events
            if event.tag in ("started", "ended")
        ]
        return histories[-1:] == ["started"] and self.slurm.state(self.job()) == "RUNNING"

    def has_all_nodes(self) -> bool:
        """Return True if Slurm has all nodes; resume nodes that Slurm has set to down or drain.

        Slurm does so after a fault; an administrator would resume them too.
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
        """Return True if an attempt has started; release its requeued job from Slurm's delay.

        Slurm holds a requeued job until its old credential has expired. The owner of a job may skip the
        delay (scontrol(1), StartTime).
        """
        histories = [
            event for event in Journal(self.run).read().events if event.tag in ("started", "ended")
        ]
        if histories[-1].tag == "started":
            return True
        if time.monotonic() > self._looked + 2.0:
            self._looked = time.monotonic()
            shown = self.slurm.scontrol_show_job(self.job())
            held = (shown["JobState"], shown["Reason"]) == ("PENDING", "BeginTime")
            # Wait for a second poll: a node that still cleans up after the old attempt loses the new script.
            if held and self._held:
                self.slurm.admin("scontrol", "update", f"jobid={self.job()}", "StartTime=now")
            self._held = held and not self._held
        return False

    def wait_for_end(self, ends: int) -> None:
        """Wait until more than ``ends`` attempts have ended.

        After a node failure, the next attempt records the end.
        """
        self.wait(lambda: len(self.ends()) > ends, "no attempt has ended")

    def wait_for_account(self, run: RunDirectory, patience: float) -> None:
        """Wait until the batch step has written the run's goodput into result.json."""
        job = [event.attempt.job for event in Journal(run).read().events if event.attempt][-1]
        deadline = time.monotonic() + patience
        while (read_json(run.result) or {}).get("goodput") is None:
            failed = self.slurm.state(job) in FINAL_STATES - {"COMPLETED"}
            assert not failed, f"job {job} has failed\n{self.story(run)}"
            assert time.monotonic() < deadline, f"no end in {patience:.0f} s\n{self.story(run)}"
            time.sleep(1.0)
