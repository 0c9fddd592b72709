"""Samples of a GPU from a driver that plays values back."""

import math
import time

from hpcrun.devices.vendor import GpuUse
from hpcrun.train.metrics.log import gpu_facts


class Driver:
    """A GPU with the listed samples, which is lost after these."""

    def __init__(self, *samples: tuple[float, float]) -> None:
        self.samples = list(samples)
        self.lost = False

    def sample(self) -> tuple[float, float]:
        self.lost = not self.samples
        return self.samples.pop(0)


def sampled(driver: Driver) -> GpuUse:
    use = GpuUse(driver.sample, every=0.001)
    until = time.monotonic() + 60
    while not driver.lost:
        assert time.monotonic() < until
        time.sleep(0.01)
    return use


def test_a_line_has_the_mean_and_the_maximum() -> None:
    use = sampled(Driver((100, 2 << 30), (50, 8 << 30), (90, 4 << 30)))
    assert use.read() == (80.0, 8 << 30)
    assert all(map(math.isnan, use.read()))
    use.close()


def test_a_gpu_without_an_answer_has_no_samples() -> None:
    assert all(map(math.isnan, sampled(Driver()).read()))


def test_a_metrics_line_has_the_ranks_that_know() -> None:
    nan = math.nan
    assert gpu_facts([80.0, nan, 90.04], [3e9, nan, 5.0004e9]) == {
        "gpu_utilization": 85.0,
        "gpu_memory_gb": 5.0,
    }
    assert gpu_facts([nan], [nan]) == {}
