"""Trainings with transformers and Accelerate on a real Slurm: preempted, and killed, with equal bits."""

from __future__ import annotations

import pytest

from hpcrun.run.directory import RunDirectory
from tests import jobs

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle, pytest.mark.slow]

SCRIPT = """
import os, signal, sys, time
from tests.integrations import trainings

attempt, rank, pause = os.environ["HPCRUN_RESTART"], os.environ["RANK"], float(sys.argv[2])

def at(step):
    time.sleep(pause)
    if pause and (attempt, rank) == ("1", "1"):
        os.kill(os.getpid(), signal.SIGKILL)

if sys.argv[1] == "transformers":
    weights, steps, _ = trainings.with_trainer("out", at)
else:
    weights, steps = trainings.with_accelerate(None, at)
if rank == "0":
    print(f"weights {weights} after step {steps}")
"""


@pytest.fixture(scope="module")
def bench(slurm: SlurmCluster) -> Bench:
    bench = Bench(slurm)
    bench.write("train.py", SCRIPT)
    return bench


@pytest.mark.parametrize("framework", ["transformers", "accelerate"])
def test_a_preempted_and_killed_training_ends_with_the_same_bits(
    bench: Bench, framework: str
) -> None:
    pytest.importorskip(framework, reason="pip install 'hpcrun[integrations]'")
    cut = submitted(bench, f"{framework}-cut", framework, "3")
    bench.slurm.wait_until(
        lambda: (bench.status(cut.name)["committed"] or 0) >= 5, ENDED, lambda: bench.told(cut)
    )
    bench.preempt_everything()
    whole = submitted(bench, f"{framework}-whole", framework, "0")
    bench.slurm.wait_until(cut.result.exists, 2 * ENDED, lambda: bench.told(cut))
    bench.slurm.wait_until(whole.result.exists, 2 * ENDED, lambda: bench.told(whole))
    causes = [event.cause for event in jobs.events(cut, "ended")]
    assert causes == ["preemption", "crash", "finished"], bench.told(cut)
    assert "after step 12" in weights(cut)
    assert weights(cut) == weights(whole), bench.told(cut)


def submitted(bench: Bench, name: str, *arguments: str) -> RunDirectory:
    """Submit the script on two nodes with a rank each."""
    shape = ("--nodes", "2", "--gpus", "1", "--cpu", "--executor", "slurm", "--detach")
    script = ("--no-snapshot", "--", "python", "train.py", *arguments)
    bench.hpcrun("submit", "--name", name, *shape, *script)
    return bench.run(name)


def weights(run: RunDirectory) -> str:
    """Return the line about the weights in the log of rank 0."""
    texts = [path.read_text() for path in run.logs.rglob("rank-00000.log")]
    (line,) = [line for text in texts for line in text.splitlines() if line.startswith("weights")]
    return line
