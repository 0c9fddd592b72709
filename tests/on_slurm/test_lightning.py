"""A Lightning program on a real Slurm: preempted, and killed in the same epoch, with equal bits."""

from __future__ import annotations

import pytest

from hpcrun.run.directory import RunDirectory
from tests import jobs

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle, pytest.mark.slow]

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
from hpcrun import STOP
from tests.integrations.lightning_programs import with_lightning

attempt, rank, done = os.environ["HPCRUN_RESTART"], os.environ["RANK"], []

def after(batch):
    done.append(batch)
    if sys.argv[1] == "cut" and (attempt, len(done)) == ("0", 4):
        Path(f"waits-{rank}").touch()
        while not STOP.reason:
            time.sleep(0.1)
    if sys.argv[1] == "cut" and (attempt, rank, len(done)) == ("1", "1", 4):
        os.kill(os.getpid(), signal.SIGKILL)

weights, steps = with_lightning(after)
if rank == "0":
    print(f"weights {weights} after step {steps}, first batch {done[:1]}")
"""


def test_a_preempted_and_killed_program_ends_with_the_same_bits(slurm: SlurmCluster) -> None:
    pytest.importorskip("lightning", reason="pip install 'hpcrun[integrations]'")
    bench = Bench(slurm)
    bench.write("train.py", SCRIPT)
    cut = submitted(bench, "cut")
    slurm.wait_until(
        lambda: len([*bench.folder.glob("waits-*")]) == 2, ENDED, lambda: bench.told(cut)
    )
    bench.preempt_everything()
    slurm.wait_until(cut.result.exists, 2 * ENDED, lambda: bench.told(cut))
    whole = submitted(bench, "whole")
    slurm.wait_until(whole.result.exists, 2 * ENDED, lambda: bench.told(whole))
    causes = [event.cause for event in jobs.events(cut, "ended")]
    assert causes == ["preemption", "crash", "finished"], bench.told(cut)
    weights, first = ending(cut)
    assert first != "[1]", bench.told(cut)
    assert (weights, "[1]") == ending(whole), bench.told(cut)


def submitted(bench: Bench, name: str) -> RunDirectory:
    """Submit the program on two nodes with a rank each."""
    shape = ("--nodes", "2", "--gpus", "1", "--cpu", "--executor", "slurm", "--detach")
    bench.hpcrun(
        "submit", "--name", name, *shape, "--no-snapshot", "--", "python", "train.py", name
    )
    return bench.run(name)


def ending(run: RunDirectory) -> tuple[str, str]:
    """Return the weights and steps, and the first batch of the last attempt, as rank 0 printed them."""
    texts = [path.read_text() for path in run.logs.rglob("rank-00000.log")]
    (line,) = [line for text in texts for line in text.splitlines() if line.startswith("weights")]
    weights, _, first = line.partition(", first batch ")
    return weights, first
