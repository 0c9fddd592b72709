"""Programs of users on a real Slurm: every kind of stop and a damaged checkpoint change no bit."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from tests.support import jobs

from . import own_examples
from .cluster import SlurmCluster
from .interrupted import KILLED, PROGRAMS
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle, pytest.mark.slow]

FRAMEWORKS = ("lightning", "transformers", "accelerate")
CAUSES = ["preemption", "crash", "preemption", "time-limit", "finished"]


@pytest.fixture
def bench(slurm: SlurmCluster) -> Iterator[Bench]:
    yield Bench(slurm)
    slurm.heal()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("program", PROGRAMS)
def test_four_faults_and_a_flipped_byte_change_no_bit(bench: Bench, program: str) -> None:
    if program in FRAMEWORKS and find_spec(program) is None:
        pytest.skip("pip install 'hpcrun[integrations]'")
    if program in own_examples.EXAMPLES:
        checkouts = os.environ.get("HPCRUN_TEST_EXAMPLES")
        if not checkouts:
            pytest.skip("HPCRUN_TEST_EXAMPLES: set it to a folder with checkouts of the frameworks")
        own_examples.prepare(own_examples.EXAMPLES[program], Path(checkouts), bench.folder)
    cut = submitted(bench, program, "cut", "faults")

    wait_for_ranks(bench, cut, 0)
    bench.preempt_everything()

    wait_for_ranks(bench, cut, KILLED)
    # The crash comes after a save of this attempt.
    wait(bench, cut, lambda: (bench.status("cut")["committed"] or 0) >= 5)
    (bench.folder / "cut" / "kill").touch()

    wait_for_ranks(bench, cut, 2)
    with bench.all_nodes_taken():
        before, newest = sorted(map(step_of, checkpoints(cut)))[-2:]
        flip_byte(next(path for path in checkpoints(cut) if step_of(path) == newest))

    wait_for_ranks(bench, cut, 3)
    whole = submitted(bench, program, "whole")
    shorten_limit(bench, cut)
    wait(bench, cut, lambda: len(jobs.events(cut, "ended")) == 4)
    bench.slurm.admin("scontrol", "update", f"jobid={job(bench)}", "TimeLimit=30")

    for run in (cut, whole):
        wait(bench, run, run.result.exists)
    assert [event.cause for event in jobs.events(cut, "ended")] == CAUSES, bench.told(cut)
    said = "".join(path.read_text() for path in cut.logs.rglob("rank-00000.log"))
    # After the crash, and again in place of the damaged checkpoint.
    assert said.count(f"hpcrun: resumed after step {before} from ") == 2, said
    assert re.search(rf"step {newest} skipped: |checkpoint-{newest} is damaged \(", said), said
    assert samples(bench, "cut") == samples(bench, "whole")
    assert weights(bench, "cut") == weights(bench, "whole")


def submitted(bench: Bench, program: str, name: str, *faults: str) -> RunDirectory:
    """Submit the program on two nodes with a rank each."""
    bench.slurm.run(["mkdir", str(bench.folder / name)])
    shape = ("--nodes", "2", "--gpus", "1", "--cpu", "--executor", "slurm", "--detach")
    # The killed ranks of several programs must not exclude their nodes.
    limit = ("--no-snapshot", "job.time=30", "job.signal_lead=20", "job.exclude_after=null")
    command = ("python", "-m", "tests.on_slurm.interrupted", program, name, *faults)
    bench.hpcrun("submit", "--name", name, *shape, *limit, "--", *command)
    return bench.run(name)


def wait(bench: Bench, run: RunDirectory, condition: Callable[[], bool]) -> None:
    bench.slurm.wait_until(condition, 2 * ENDED, lambda: bench.told(run))


def wait_for_ranks(bench: Bench, run: RunDirectory, attempt: int) -> None:
    """Wait until all ranks wait for the fault of ``attempt``."""

    def arrived() -> bool:
        # Another fault of a busy machine would shift the numbers of the attempts.
        assert not run.result.exists(), bench.told(run)
        return len([*(bench.folder / run.name).glob(f"waits-{attempt}-*")]) == 2

    wait(bench, run, arrived)


def job(bench: Bench) -> str:
    """Return the id of the interrupted run's job."""
    return str(bench.status("cut")["job"])


def shorten_limit(bench: Bench, run: RunDirectory) -> None:
    """Set a time limit that leaves the job about a minute."""
    hours, minutes, seconds = map(
        int, bench.slurm.scontrol_show_job(job(bench))["RunTime"].split(":")
    )
    limit = 60 * hours + minutes + (seconds + 40) // 60 + 1
    bench.slurm.run(["scontrol", "update", f"jobid={job(bench)}", f"TimeLimit={limit}"])


def checkpoints(run: RunDirectory) -> list[Path]:
    """Return the folders of the checkpoints, which hpcrun or the framework has named."""
    return [
        path for path in run.checkpoints.iterdir() if re.match(r"(step|checkpoint)-\d", path.name)
    ]


def step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.rpartition("-")[2])


def flip_byte(checkpoint: Path) -> None:
    """Change a bit in the middle of the largest file."""
    path = max(
        (one for one in checkpoint.rglob("*") if one.is_file()), key=lambda one: one.stat().st_size
    )
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


def samples(bench: Bench, name: str) -> list[dict[int, list[str]]]:
    """Return the samples of each step, for each rank; a repeated step must have the same samples."""
    found = []
    for rank in range(2):
        lines = (bench.folder / name / f"samples-{rank}.jsonl").read_text().splitlines()
        steps: dict[int, list[str]] = {}
        for line in map(json.loads, lines):
            assert line["samples"]
            assert steps.setdefault(line["step"], line["samples"]) == line["samples"]
        found.append(steps)
    return found


def weights(bench: Bench, name: str) -> list[str]:
    """Return the hash of the final weights on each rank."""
    return [(bench.folder / name / f"weights-{rank}").read_text() for rank in range(2)]
