"""Slurm is asked ever more rarely about a running job; files are polled at a fixed rate."""

from itertools import accumulate, islice

from hpcrun.slurm.launch.jobs import LONGEST, pauses


def test_pauses_on_slurm_grow_to_a_minute() -> None:
    found = list(islice(pauses("slurm", 15.0), 20))
    assert found[0] == 15.0
    assert found == sorted(found)
    assert found[-1] == LONGEST


def test_waiting_for_an_end_asks_slurm_rarely() -> None:
    asked = [at for at in accumulate(islice(pauses("slurm", 0.2), 50)) if at < 60]
    assert len(asked) < 20
    assert asked[3] < 2
