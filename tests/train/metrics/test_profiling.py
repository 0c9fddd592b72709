"""The schedule of the profiler; ``test_run_results.py`` checks its output in a whole run."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hpcrun.run.directory import RunDirectory
from hpcrun.train.metrics.stopwatch import Stopwatch
from hpcrun.train.metrics.timing import Profile, step_times, steps_of
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


def test_attempts_that_stop_in_the_window_keep_all_their_profiles(tmp_path: Path) -> None:
    for start in (0, 4):
        watched = profile(tmp_path, "2-30", start)
        watched.before(max(start, 1))
        torch.ones(3).cumsum(0)
        watched.stop(start + 2)
        # A save is no part of a step.
        torch.ones(3).cumprod(0)
        watched.close()
        name = f"rank-00001{'-from-step-5' if start else ''}"
        table = (tmp_path / "profile" / f"operations-{name}.txt").read_text()
        assert "aten::cumsum" in table
        assert "aten::cumprod" not in table
        assert (tmp_path / "profile" / f"trace-{name}.json.gz").stat().st_size


@pytest.mark.parametrize("place", ["stop", "events"])
def test_a_failed_profile_does_not_end_the_training(
    tmp_path: Path, place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(_: object) -> None:
        raise ValueError("no records")

    monkeypatch.setattr(torch.profiler.profile, place, fail)
    watched = profile(tmp_path, "2-30", 0)
    watched.before(1)
    watched.stop(3)
    watched.close()
    watched.before(29)
    assert "cannot write the profile: no records" in capsys.readouterr().err


def event(name: str, start: float, end: float, device: str = "CUDA", note: bool = False) -> object:
    """Return an event of the profiler, from ``start`` to ``end`` in ms."""
    return SimpleNamespace(
        name=name,
        device_type=SimpleNamespace(name=device),
        is_user_annotation=note,
        time_range=SimpleNamespace(start=1e3 * start, end=1e3 * end),
    )


OVERLAPPING = [
    ("gemm", 10, 40),
    ("ncclDevKernel_AllGather_RING_LL", 20, 50),
    ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL", 45, 60),
    ("Memcpy HtoD", 58, 70),
]


@pytest.mark.parametrize(
    "events",
    [
        [
            *(event(*one) for one in OVERLAPPING),
            # Python runs before and after the kernels, and annotations are no kernels.
            *(event("aten::mm", 0, 5, "CPU"), event("cudaDeviceSynchronize", 70, 100, "CPU")),
            event("nccl:all_gather", 0, 100, note=True),
        ],
        [
            *(event("aten::mm", 10, 30, "CPU"), event("aten::addmm", 30, 40, "CPU")),
            *(event("gloo:all_reduce", 20, 60, "CPU"), event("aten::add_", 58, 70, "CPU")),
            event("AddmmBackward0", 0, 100, "CPU"),
        ],
    ],
    ids=["nccl", "gloo"],
)
def test_communication_counts_while_nothing_else_runs(events: list[object]) -> None:
    assert step_times(events, 2) == (
        "a step of 50.0 ms: computation 21.0 ms, communication that it does not hide 9.0 ms, idle 20.0 ms"
    )
