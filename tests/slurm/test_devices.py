"""Counting GPUs without torch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrun.devices.devices import given_gpus, require_given_gpus, visible_gpus
from hpcrun.errors import NodeUnfit


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
        # CUDA shows one slice to a process.
        ("MIG-9f1c,MIG-2a3b", 1),
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


def test_gpus_that_the_jobs_control_group_hides_do_not_count(
    monkeypatch: pytest.MonkeyPatch, two_gpus_in_proc: Path
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", fake_nvml(0))
    assert visible_gpus({}, proc=two_gpus_in_proc, driver=two_gpus_in_proc / "absent") == 0


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


@pytest.fixture
def amd_node(tmp_path: Path) -> Path:
    """The parts of AMD's topology files that hpcrun reads, for a node with one CPU and two GPUs."""
    for number, compute_units in enumerate(("0", "304", "304")):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = f"cpu_cores_count {0 if number else 64}\nsimd_count {compute_units}\nmem_banks_count 1\n"
        (folder / "properties").write_text(text)
    (tmp_path / "kfd").touch()
    return tmp_path


def amd_count(environ: dict[str, str], node: Path, driver: str = "kfd") -> int:
    return visible_gpus(environ, proc=node / "absent", kfd=node, driver=node / driver)


def test_amds_driver_is_asked_for_its_gpus(amd_node: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert amd_count({}, amd_node) == 2
    # A container with /sys but without the device has no GPU for ROCm.
    assert amd_count({}, amd_node, driver="absent") == 0


def test_amds_variables_are_read_one_within_the_other(amd_node: Path) -> None:
    assert amd_count({"ROCR_VISIBLE_DEVICES": "0,1,2,3"}, amd_node) == 4
    assert amd_count({"ROCR_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": "0"}, amd_node) == 1
    both = {"ROCR_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "0,1"}
    assert amd_count(both, amd_node) == 2
    assert amd_count({"HIP_VISIBLE_DEVICES": ""}, amd_node) == 0
    # Without AMD's driver only CUDA's own variable decides, whatever a profile sets for ROCm.
    assert (
        amd_count({"CUDA_VISIBLE_DEVICES": "0,1", "HIP_VISIBLE_DEVICES": ""}, amd_node, "no") == 2
    )


@pytest.mark.parametrize(
    ("environ", "given"),
    [
        ({}, 0),
        ({"SLURM_JOB_ID": "7"}, 0),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4"}, 4),
        ({"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1"}, 2),
        ({"SLURM_JOB_ID": "7", "SLURM_STEP_GPUS": "3"}, 1),
        ({"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4", "HPCRUN_LOCAL_CLUSTER": "1"}, 0),
    ],
)
def test_what_slurm_gave_is_read_from_its_variables(environ: dict[str, str], given: int) -> None:
    assert given_gpus(environ) == given


def test_a_job_with_gpus_that_sees_none_is_refused() -> None:
    environ = {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(NodeUnfit, match=r"gave this job 4 GPU\(s\) here.*--nv.*--cpu") as refusal:
        require_given_gpus(environ)
    assert "\n" not in str(refusal.value)
    require_given_gpus({**environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3"})
    require_given_gpus({**environ, "SLURM_GPUS_ON_NODE": "0"})
    # Intel's GPUs, which torch shows elsewhere.
    require_given_gpus({**environ, "ZE_AFFINITY_MASK": "0"})


def test_a_job_for_uncounted_gpus_that_sees_none_is_refused() -> None:
    environ = {"SLURM_JOB_ID": "7", "HPCRUN_GPU_JOB": "7", "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(NodeUnfit, match=r"the job is for GPUs.*--cpu.*job\.gpu_request") as refusal:
        require_given_gpus(environ)
    assert "\n" not in str(refusal.value)
    require_given_gpus({**environ, "CUDA_VISIBLE_DEVICES": "0,1"})
    # The variable of the job from which this job was submitted.
    require_given_gpus({**environ, "SLURM_JOB_ID": "8"})
