"""The reader of NVML and of the kernel's log, on a constructed driver."""

from __future__ import annotations

from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest

from hpcrun.network.preflight.gpus import parse_xids, read_gpus


class Refused(Exception):
    """NVML's error."""


class Driver:
    """A driver of two GPUs: the second is lost, and some questions are not supported."""

    NVMLError = Refused
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, refuses: tuple[str, ...] = (), lost: int | None = None) -> None:
        self._refuses, self._lost = refuses, lost
        self.open = False
        self._answers: dict[str, Any] = {
            "nvmlSystemGetDriverVersion": b"550.54",
            "nvmlDeviceGetCount": 2,
            "nvmlDeviceGetName": "NVIDIA H100",
            "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:3B:00.0"),
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": [0, 0, 1, 0],
            "nvmlDeviceGetCurrentClocksThrottleReasons": 4,
            "nvmlDeviceGetCurrPcieLinkWidth": 8,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
        }

    def nvmlInit(self) -> None:
        if "nvmlInit" in self._refuses:
            raise Refused("Driver/library version mismatch")
        self.open = True

    def nvmlShutdown(self) -> None:
        self.open = False

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == self._lost:
            raise Refused("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}"

    def __getattr__(self, name: str) -> Any:
        def answer(*_: object) -> Any:
            assert self.open
            if name in self._refuses:
                raise Refused("Not Supported")
            return self._answers[name]

        return answer


def read(driver: Driver, **environ: str) -> dict[str, Any]:
    return read_gpus(environ, cast(ModuleType, driver))


def test_the_numbers_of_each_gpu_are_read() -> None:
    driver = Driver()
    told = read(driver)
    assert told["driver"] == "550.54"
    assert len(told["devices"]) == 2
    first = told["devices"][0]
    assert (first["bus"], first["width"], first["full_width"]) == ("00000000:3B:00.0", 8, 16)
    assert (first["remap_pending"], first["remap_failed"], first["throttling"]) == (True, False, 4)
    assert not driver.open


def test_what_the_driver_does_not_support_is_none() -> None:
    told = read(Driver(("nvmlDeviceGetTotalEccErrors", "nvmlDeviceGetRemappedRows")))
    assert told["devices"][0]["uncorrected"] is None
    assert told["devices"][0]["remap_failed"] is None
    assert told["devices"][0]["width"] == 8


def test_a_lost_gpu_is_a_separate_record() -> None:
    assert read(Driver(lost=1))["devices"][1] == {"index": 1, "problem": "GPU is lost"}


def test_a_driver_that_does_not_answer_is_one_sentence() -> None:
    told = read(Driver(("nvmlInit",)))
    assert told == {"problem": "NVML does not start: Driver/library version mismatch"}


@pytest.mark.parametrize(
    ("listed", "indices"),
    [("1", [1]), ("GPU-11", [1]), ("1,0", [1, 0]), ("0,-1,1", [0]), ("MIG-a", [0, 1]), ("", [])],
)
def test_only_the_visible_gpus_count(listed: str, indices: list[int]) -> None:
    told = read(Driver(), CUDA_VISIBLE_DEVICES=listed)
    assert [device["index"] for device in told["devices"]] == indices


def test_xid_lines_of_the_kernel_are_read() -> None:
    log = (
        "<6>[  100.000000] usb 1-1: new device\n"
        "<3>[ 5000.500000] NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', GPU has fallen off the bus.\n"
        "[ 6000.000000] NVRM: Xid (PCI:0000:af:00): 31, pid=1234, name=python, MMU Fault\n"
    )
    assert parse_xids(log, 7000.0) == [
        {"bus": "0000:3b:00", "number": 79, "age": 2000},
        {"bus": "0000:af:00", "number": 31, "age": 1000},
    ]
