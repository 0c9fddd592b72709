"""Samples of a GPU's utilization, from a substitute for the driver's module ``pynvml``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

PYNVML = """
calls = []
values = iter([100, 50, 90])


class NVMLError(Exception):
    pass


class NVMLError_DriverNotLoaded(NVMLError):
    pass


class Rates:
    def __init__(self, gpu):
        self.gpu = gpu


def nvmlInit():
    calls.append("init")


def nvmlDeviceGetHandleByIndex(index):
    return index


def nvmlDeviceGetUtilizationRates(handle):
    calls.append(handle)
    try:
        return Rates(next(values))
    except StopIteration:
        raise NVMLError("GPU is lost") from None
"""

PROGRAM = """
import sys, threading, torch
from hpcrun.devices import vendor

assert vendor.gpu_utilization(torch.device("cpu")) is None
names = [thread.name for thread in threading.enumerate()]
found = vendor.gpu_utilization(torch.device("cuda", 1), every=0.001)
for thread in threading.enumerate():
    if thread.name not in names:
        thread.join()
print(found.read(), found.read())
if "pynvml" in sys.modules:
    print(sorted(set(map(str, sys.modules["pynvml"].calls))))
"""


@pytest.mark.skipif(
    torch.version.cuda is not None or torch.version.hip is not None,
    reason="the substitute is for the CPU build of torch",
)
@pytest.mark.parametrize(
    ("module", "printed"),
    [
        # The mean of the samples, then the newest; the second visible GPU is the fourth of the node.
        (PYNVML, "80.0 90.0\n['3', 'init']\n"),
        ("raise ImportError('no such module')", "nan nan\n"),
    ],
)
def test_the_driver_is_read_if_its_module_is_there(
    tmp_path: Path, module: str, printed: str
) -> None:
    (tmp_path / "pynvml.py").write_text(module)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={
            **os.environ,
            "PYTHONPATH": f"{tmp_path}:{ROOT}",
            "CUDA_VISIBLE_DEVICES": "2,3",
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.stdout == printed, done.stderr[-2000:]
