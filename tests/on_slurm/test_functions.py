"""Functions on a real Slurm: the values of two nodes, a requeue, and an array with a failed call."""

import pytest

from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]

PROGRAM = """
import os, time
from pathlib import Path
import hpcrun

wanted = dict(cpu=True, executor="slurm", mem="1G", snapshot=False)
once = dict(overrides={"restarts.crash": 0})

def place(power):
    started = Path(f"started-{power}-{os.environ['RANK']}")
    if power == 3 and not started.exists():
        started.touch()
        time.sleep(3600)
    return int(os.environ["RANK"]) ** power, os.environ["SLURMD_NODENAME"], os.environ["HPCRUN_RESTART"]

two = hpcrun.submit(place, 2, nodes=2, gpus=1, **wanted)
again = hpcrun.submit(place, 3, name="again", nodes=1, gpus=1, **wanted)
many = hpcrun.map_array(divmod, [7, 1, 9], [2, 0, 4], nodes=1, gpus=1, **once, **wanted)
while not Path("started-3-0").exists():
    time.sleep(1)
again.preempt()
values = two.results()
print([value[0] for value in values], len({value[1] for value in values}))
print(many["000"].result(), many["002"].result())
try:
    many["001"].result()
except ZeroDivisionError as error:
    print(error.__cause__.args[0].splitlines()[-1])
print(again.result()[2])
"""


def test_functions_run_on_nodes_and_survive_a_requeue(bench: Bench) -> None:
    done = bench.slurm.run(
        [bench.slurm.python, "-c", PROGRAM], cwd=bench.folder, env=bench.environ()
    )
    assert done.stdout.splitlines() == [
        "[0, 1] 2",
        "(3, 1) (2, 1)",
        "ZeroDivisionError: integer division or modulo by zero",
        "1",
    ]
