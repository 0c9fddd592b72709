"""hpcrun.submit on a real Slurm: wait and result of a run, cancel of another."""

import pytest

from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]

PROGRAM = """
import time
import hpcrun

wanted = dict(nodes=1, gpus=1, cpu=True, executor="slurm", mem="1G", snapshot=False)
short = hpcrun.submit(command=["true"], name="short", **wanted)
long = hpcrun.submit(command=["sleep", "3600"], name="long", **wanted)
assert short.wait() == "finished", short.status()
assert short.result()["state"] == "finished"
while long.status()["state"] != "running":
    assert long.status()["state"] == "pending"
    time.sleep(1)
try:
    long.wait(timeout=1)
except TimeoutError as error:
    print(error)
long.cancel(now=True)
assert long.result()["state"] == "cancelled", long.result()
try:
    hpcrun.submit(command=["true"], name="lost", partition="nope", **wanted)
except hpcrun.UserError as error:
    print(error)
"""


def test_a_program_submits_waits_and_cancels(bench: Bench) -> None:
    done = bench.slurm.run(
        [bench.slurm.python, "-c", PROGRAM], cwd=bench.folder, env=bench.environ()
    )
    late, refused = done.stdout.splitlines()
    assert late == "long: has not ended after 1 s; the job continues"
    assert refused.startswith("sbatch refused: ")
    assert {path.name for path in (bench.folder / "runs").iterdir()} == {"short", "long"}
