"""Counting GPUs without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrun.cluster.devices import visible_gpus


@pytest.mark.parametrize(
    ("listed", "count"),
    [
        ("0,1,2,3", 4),
        ("3", 1),
        ("", 0),
        ("-1", 0),
        ("NoDevFiles", 0),
        ("0,1,-1,2", 2),
        ("0, 1", 2),
        ("0,1,x,2", 2),
        ("0,0", 0),
        ("GPU-1a2b,GPU-3c4d", 2),
        ("MIG-9f1c", 1),
    ],
)
def test_the_variable_is_read_as_cuda_reads_it(listed: str, count: int, tmp_path: Path) -> None:
    (tmp_path / "0000:01:00.0").mkdir()
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": listed}, proc=tmp_path) == count


class NVMLError(Exception):
    pass


def fake_nvml(count: int | None) -> SimpleNamespace:
    def fail_without_driver() -> None:
        if count is None:
            raise NVMLError

    return SimpleNamespace(
        NVMLError=NVMLError,
        nvmlInit=fail_without_driver,
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: count,
    )


@pytest.fixture
def two_gpus_in_proc(tmp_path: Path) -> Path:
    for address in ("0000:01:00.0", "0000:02:00.0"):
        (tmp_path / address).mkdir()
    return tmp_path


def test_without_the_variable_nvml_is_asked(
    monkeypatch: pytest.MonkeyPatch, two_gpus_in_proc: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(8))
    assert visible_gpus({}, proc=two_gpus_in_proc) == 8


@pytest.mark.parametrize("nvml", [None, fake_nvml(None)], ids=["not installed", "no driver"])
def test_without_nvml_the_drivers_list_counts(
    nvml: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch, two_gpus_in_proc: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert visible_gpus({}, proc=two_gpus_in_proc) == 2


def test_a_machine_without_a_driver_has_no_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert visible_gpus({}, proc=tmp_path / "absent") == 0
