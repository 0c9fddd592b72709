"""The schedule of the profiler; ``test_run_results.py`` checks its output in a whole run."""

from pathlib import Path

import torch

from hpcrun.run.directory import RunDirectory
from hpcrun.train.metrics.stopwatch import Stopwatch
from hpcrun.train.metrics.timing import Profile, steps_of
from hpcrun.train.position import Position


def profile(folder: Path, window: str | None, start: int, rank: int = 1) -> Profile:
    device = torch.device("cpu")
    return Profile(
        RunDirectory(folder),
        window,
        start,
        rank=rank,
        device=device,
        watch=Stopwatch(device),
        position=Position(),
    )


def test_steps_are_counted_from_one() -> None:
    assert list(steps_of("10-12")) == [9, 10, 11]
    assert list(steps_of("4")) == [3]
    assert list(steps_of(None)) == []


def test_a_window_that_the_end_cuts_off_is_written_too(tmp_path: Path) -> None:
    watched = profile(tmp_path, "2-30", start=4)
    watched.before(4)
    torch.ones(3).cumsum(0)
    watched.close(5)
    assert "aten::cumsum" in (tmp_path / "profile" / "operations-rank-00001.txt").read_text()
    assert (tmp_path / "profile" / "trace-rank-00001.json.gz").stat().st_size
