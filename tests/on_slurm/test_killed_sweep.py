"""A submission of a sweep that is killed right after a real sbatch leaves one array, which is named."""

from __future__ import annotations

import re

import pytest

from tests.slurm.launch.test_killed_sweep import HANDOVER, KILLED

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

SHAPE = ("--nodes", "1", "--gpus", "1", "--cpu", "--executor", "slurm", "--no-snapshot")
# Waits for the file `go`: the next submission finds the array alive.
ELEMENT = "echo $1 >> ran; while [ ! -e go ]; do sleep 0.1; done"


def test_the_array_of_a_killed_submission_is_named(slurm: SlurmCluster) -> None:
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
    refused = bench.hpcrun(*line, check=False)
    array = re.search(r"`scancel (\d+)`", refused)
    assert array is not None, refused
    slurm.run(["scancel", array[1]])
    slurm.wait_until(lambda: "3 runs submitted" in bench.hpcrun(*line, check=False), ENDED)
    bench.hpcrun("cancel", "--now", "s")
