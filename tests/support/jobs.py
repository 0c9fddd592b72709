"""Start and disturb whole jobs on the local cluster."""

import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json, read_lines
from hpcrun.run.journal.events import Event
from hpcrun.slurm.launch import jobs
from hpcrun.slurm.local import job_files
from hpcrun.slurm.local.job_files import JobStatus
from hpcrun.storage.store import CheckpointStore
from tests.support.journal import read_events
from tests.support.start_server import COMMANDS

PATIENCE = 300.0
"""Seconds for each wait: a start on a busy machine takes minutes."""

PROBE = '''
"""A small task with all state that a resume must restore: dropout, batch norm, several gradient buckets."""

import json, os, time
import torch
from torch import nn
from torch.utils.data import Dataset
from hpcrun.ranks.signals import STOP
from hpcrun.run.attempt import attempt_here
from hpcrun.train.task import Task


class Numbers(Dataset):
    def __len__(self):
        return 203

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        return torch.randn(16, generator=generator), torch.tensor(index)


class Probe(Task):
    def build_model(self):
        # Larger than 1 MiB, DDP's first bucket, so the gradients need several buckets.
        return nn.Sequential(
            nn.Linear(16, 640), nn.BatchNorm1d(640), nn.GELU(), nn.Dropout(0.2),
            nn.Linear(640, 640), nn.GELU(), nn.Dropout(0.2), nn.Linear(640, 1),
        )

    def train_dataset(self):
        return Numbers()

    def validation_dataset(self):
        return Numbers()

    def loss(self, model, batch):
        values, indices = batch
        if model.training:
            self.note(indices)
            fault = self.config.model.own.get("fault")
            if fault:
                self.meet(fault)
            time.sleep(self.config.model.own.get("pause", 0.0))
            self.wait_while_held()
        return (model(values).squeeze(-1) - values.sum(-1)).square().mean()

    def note(self, indices):
        attempt = attempt_here(os.environ["SLURM_JOB_ID"], os.environ).owner
        name = "samples-{}-{}.jsonl".format(attempt, os.environ["RANK"])
        with open(os.path.join(self.config.data.own["log"], name), "a") as log:
            log.write(json.dumps(indices.tolist()) + "\\n")

    def wait_while_held(self):
        # With a limit: a killed test must not leave a run that waits forever.
        late = time.monotonic() + 5
        hold = os.path.join(self.config.data.own["log"], "hold")
        while time.monotonic() < late:
            try:
                with open(hold) as asked:
                    deaf = asked.read() == "deaf"
            except FileNotFoundError:
                return
            if STOP.reason and not deaf:
                return
            time.sleep(0.02)

    def meet(self, fault):
        self.calls = getattr(self, "calls", 0) + 1
        if os.environ["RANK"] == str(fault["rank"]) and self.calls == fault["call"]:
            raise ValueError("the data of call {} is broken".format(self.calls))
'''


def write_probe(folder: Path) -> None:
    """Write the probe task to the place where a submission from ``folder`` finds it."""
    (folder / "probe.py").write_text(PROBE)


def probe_config(folder: Path, **changes: Any) -> list[str]:
    """Return overrides for a short run of the probe task."""
    settings: dict[str, Any] = {
        "task": "probe:Probe",
        "job.nodes": 2,
        "job.gpus": 2,
        "job.cpu": True,
        "job.executor": "local",
        "job.requeue_delay": 0.1,
        "train.steps": 40,
        "train.batch_size": 32,
        "train.accumulation": 2,
        "train.log_every": 1,
        # A step may take half of it.
        "train.timeout": 600,
        "optim.warmup_steps": 5,
        "checkpoint.every": 15,
        "data.log": str(folder),
        "seed": 3,
    }
    settings |= {key.replace("__", "."): value for key, value in changes.items()}
    return [
        f"{key}={value if isinstance(value, str) else json.dumps(value)}"
        for key, value in settings.items()
    ]


def hpcrun(
    *arguments: str, cwd: Path, timeout: float = PATIENCE, env: dict[str, str] | None = None
) -> "subprocess.CompletedProcess[str]":
    """Run the `hpcrun` program as a user would, and return its result."""
    return subprocess.run(
        [sys.executable, "-m", "hpcrun", *arguments],
        cwd=cwd,
        env=os.environ | {COMMANDS: "1"} | (env or {}),
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


def submit_probe(folder: Path, name: str, *arguments: str, **changes: Any) -> RunDirectory:
    """Submit a probe run from ``folder`` without following it."""
    write_probe(folder)
    empty = folder / "empty.yaml"
    empty.write_text("{}\n")
    settings = probe_config(folder, **changes)
    done = hpcrun(
        "submit", "-c", str(empty), "--name", name, "--detach", *settings, *arguments, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return RunDirectory(folder / "runs" / name)


def job_status(run: RunDirectory) -> JobStatus:
    """Return the last status that the local cluster's controller of the run's job wrote."""
    current = jobs.current_job(run)
    assert current is not None
    status = job_files.read_status(run.job_logs(current[1]))
    assert status is not None
    return status


def wait_for(what: Callable[[], bool], timeout: float = PATIENCE, why: str = "") -> None:
    """Wait until ``what`` is true."""
    deadline = time.monotonic() + timeout
    while not what():
        assert time.monotonic() < deadline, f"not in {timeout} s: {why or what}"
        time.sleep(0.02)


def wait_for_step(run: RunDirectory, step: int, restart: int | None = None) -> None:
    """Wait until rank 0 has logged ``step`` (in attempt ``restart``)."""

    def reached() -> bool:
        return any(
            line["step"] >= step and restart in (None, line.get("restart"))
            for line in read_lines(run.metrics)
        )

    wait_for(reached, why=f"step {step} of {run.name}")


@contextlib.contextmanager
def held(run: RunDirectory, deaf: bool = False) -> Iterator[None]:
    """Hold a probe run almost still, so that a test's action meets it on any machine.

    Every micro-batch waits until the block ends, its rank has a signal (unless ``deaf``), or five seconds
    have passed.
    """
    hold = run.path.parents[1] / "hold"
    hold.write_text("deaf" if deaf else "")
    try:
        yield
    finally:
        hold.unlink()


@contextlib.contextmanager
def held_at(run: RunDirectory, step: int, restart: int | None = None) -> Iterator[None]:
    """Hold a probe run once rank 0 has logged ``step`` (in attempt ``restart``)."""
    wait_for_step(run, step, restart)
    with held(run):
        yield


def wait_for_end(run: RunDirectory, timeout: float = PATIENCE) -> None:
    """Wait until no job owns the run."""
    wait_for(lambda: not jobs.state(run).live, timeout, f"the end of {run.name}")


def events(run: RunDirectory, what: str) -> list[Event]:
    """Return the events of one kind, in order."""
    return [event for event in read_events(run) if event.tag == what]


def result(run: RunDirectory) -> dict[str, Any]:
    """Return result.json; empty if it does not exist."""
    return read_json(run.result) or {}


def outcome(run: RunDirectory) -> tuple[Any, list[str | None]]:
    """Return the state in result.json, and the causes of the ends of all attempts."""
    return result(run).get("state"), [event.cause for event in events(run, "ended")]


def final_state(run: RunDirectory) -> dict[str, str]:
    """Return the values of the newest checkpoint: weights, optimizer, scheduler, generators.

    Values instead of files: pickle writes equal plain data differently depending on shared objects. A hash
    for each large value: pytest takes minutes to show the difference of two large values.
    """
    # Imports torch: ranks of functions import this module too.
    from hpcrun.checkpoint.sharded.rank_file import StoreReader

    store = CheckpointStore(run.checkpoints, "test-0")
    step = store.steps()[0]
    store.check(step)
    reader = StoreReader(store, step)
    tensors = {name: reader.empty(name) for name in reader.index.tensors}
    reader.load(tensors)
    state = {name: reader.blob(name) for name in reader.index.blobs}
    return dict(_leaves(state | tensors, "state"))


def replace_in_lines(path: Path, old: str, new: str) -> None:
    """Replace text in a log of JSON lines, and remove the checksums, which would not be right."""
    text = re.sub(r',"_crc32":"[0-9a-f]{8}"', "", path.read_text())
    assert old in text
    path.write_text(text.replace(old, new))


def _leaves(value: Any, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{name}[{number}]")
    elif hasattr(value, "numpy"):
        import torch

        content = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        yield name, f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(content).hexdigest()}"
    else:
        text = repr(value)
        yield name, text if len(text) < 100 else hashlib.sha256(text.encode()).hexdigest()


def samples_by_step(
    run: RunDirectory, folder: Path, rank: int, accumulation: int
) -> dict[int, list[list[int]]]:
    """Return the micro-batches of ``rank`` at each step, over all attempts.

    A recomputed step (after a kill) must have the same samples again.
    """
    found: dict[int, list[list[int]]] = {}
    for started in events(run, "started"):
        assert started.attempt is not None
        path = folder / f"samples-{started.attempt.owner}-{rank}.jsonl"
        # Each process computes its first micro-batch twice, to lay out DDP's buckets.
        batches = [json.loads(line) for line in path.read_text().splitlines()][1:]
        for number in range(len(batches) // accumulation):
            step = (started.step or 0) + number
            mine = batches[number * accumulation : (number + 1) * accumulation]
            assert found.setdefault(step, mine) == mine, f"step {step} saw other samples"
    return found


def has_ended(pid: int) -> bool:
    """Return True if the process has ended, also if its exit code was not read yet."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True
    return stat.rpartition(")")[2].split()[0] in "ZX"


def is_rank(pid: int) -> bool:
    """Return True for a rank itself, False for its srun, its children and the node's fork server."""
    parent = _parent_of(pid)
    return (
        parent is not None
        and _runs_worker(pid)
        and b"hpcrun.nodes.agent" not in _words_of(parent)
        and not is_rank(parent)
    )


def _runs_worker(pid: int) -> bool:
    words = _words_of(pid)
    return b"hpcrun.worker" in words and b"python" in Path(os.fsdecode(words[0])).name.encode()


def _words_of(pid: int) -> list[bytes]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []


def _parent_of(pid: int) -> int | None:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None
