"""Samples of a GPU, on a constructed driver that plays values back."""

import ctypes
import math
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace

import pytest

from hpcrun.devices.devices import GpuUse, ask_nvml, gpu_use
from hpcrun.train.metrics.log import gpu_facts


class Refused(Exception):
    """NVML's error."""


class Driver:
    """NVML with one GPU that has ``busy`` percent and ``used`` bytes, sample by sample; then it is lost."""

    NVMLError = Refused

    def __init__(self, busy: Sequence[int], used: Sequence[int]) -> None:
        self.busy, self.used = iter(busy), iter(used)
        self.lost = False

    def nvmlInit(self) -> None:
        """Start."""

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        """Return a handle of the only GPU; raises TypeError for text, as pynvml 11.4 does."""
        found = ctypes.c_char_p(uuid).value
        if found != b"GPU-1a2b":
            raise Refused
        return found.decode()

    def nvmlDeviceGetUtilizationRates(self, _: str) -> SimpleNamespace:
        """Return the next utilization."""
        return SimpleNamespace(gpu=self._next(self.busy))

    def nvmlDeviceGetMemoryInfo(self, _: str) -> SimpleNamespace:
        """Return the next memory."""
        return SimpleNamespace(used=self._next(self.used))

    def _next(self, values: Iterator[int]) -> int:
        found = next(values, None)
        if found is None:
            self.lost = True
            raise Refused
        return found


def sampled(driver: Driver) -> GpuUse:
    use = GpuUse(partial(ask_nvml, driver, "GPU-1a2b"), every=0.001)
    until = time.monotonic() + 60
    while not driver.lost:
        assert time.monotonic() < until
        time.sleep(0.01)
    return use


def test_a_line_has_the_mean_and_the_maximum_since_the_line_before() -> None:
    use = sampled(Driver([100, 50, 90], [2 << 30, 8 << 30, 4 << 30]))
    assert use.read() == (80.0, 8 << 30)
    assert all(map(math.isnan, use.read()))
    use.close()


def test_a_gpu_without_utilization_has_no_samples() -> None:
    # As a slice of a GPU (MIG).
    assert all(map(math.isnan, sampled(Driver([], [1])).read()))


def test_without_nvml_or_its_gpu_nothing_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert gpu_use("1a2b") is None
    monkeypatch.setitem(sys.modules, "pynvml", Driver([], []))
    assert gpu_use("other") is None
    use = gpu_use("1a2b", every=60.0)
    assert use is not None
    use.close()


def test_a_metrics_line_has_the_ranks_that_know() -> None:
    nan = math.nan
    assert gpu_facts([80.0, nan, 90.04], [3e9, nan, 5.0004e9]) == {
        "gpu_utilization": 85.0,
        "gpu_memory_gb": 5.0,
    }
    assert gpu_facts([nan], [nan]) == {}
