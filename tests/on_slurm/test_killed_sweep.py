"""A submission of a sweep that is killed right after a real sbatch leaves one array, which is found."""

from __future__ import annotations

import json

import pytest

from tests import jobs
from tests.slurm.launch.test_killed_sweep import HANDOVER, KILLED

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SHAPE = ("--nodes", "1", "--gpus", "1", "--cpu", "--executor", "slurm", "--no-snapshot")
# Waits for the file `go`: the first look finds the array alive.
ELEMENT = "echo $1 >> ran; while [ ! -e go ]; do sleep 0.1; done"


def test_the_array_of_a_killed_submission_is_found(slurm: SlurmCluster) -> None:
    bench = Bench(slurm)
    bench.write("element.sh", ELEMENT)
    line = [
        "submit",
        "--name",
        "s",
        *SHAPE,
        "--sweep",
        "seed=0:3",
        "--",
        "sh",
        "element.sh",
        "{seed}",
    ]
    command = [slurm.python, "-c", KILLED, HANDOVER, "_record", "1", *line]
    done = slurm.run(command, cwd=bench.folder, env=bench.environment(), check=False)
    assert done.returncode in (-9, 137), done.stderr
    rows = [json.loads(row) for row in bench.hpcrun("status", "--json", "s").splitlines()]
    assert {row["state"] for row in rows} <= {"pending", "running"}
    arrays = {row["job"].partition("_")[0] for row in rows}
    assert len(arrays) == 1
    assert "nothing to submit" in bench.hpcrun(*line)
    bench.write("go", "")
    runs = [bench.run(f"s/{number:03d}") for number in range(3)]
    slurm.wait_until(
        lambda: all(jobs.result(run).get("state") == "finished" for run in runs),
        ENDED,
        lambda: "\n".join(map(bench.told, runs)),
    )
    assert sorted((bench.folder / "ran").read_text().split()) == ["0", "1", "2"]
