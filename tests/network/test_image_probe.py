"""The probe of an image: its torch, its hpcrun, and the driver that is visible inside."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch

from hpcrun.devices.driver import TorchBuild, newest_of_driver, torch_build
from hpcrun.network.gpu_probes import driver, image, own_version
from hpcrun.ports.node_checks import Answer, Needs, Same


def test_the_build_of_torch_is_read_without_its_import() -> None:
    built = torch_build()
    assert built is not None
    assert built.version == torch.__version__
    assert (built.platform is None) == (torch.version.cuda is None and torch.version.hip is None)


def test_the_contents_and_another_version_of_hpcrun_are_reported() -> None:
    assert list(image(Needs(gpus=0))) == []
    other, contents = image(Needs(gpus=0, image="train.sif", version="9.9"))
    assert isinstance(other, Answer)
    assert other.status == "warn"
    assert other.words == f"hpcrun is {own_version()} in train.sif, and 9.9 outside"
    assert isinstance(contents, Same)
    assert contents.value.endswith(f", torch {torch.__version__}")


def test_an_image_without_torch_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpcrun.network.gpu_probes.torch_build", lambda: None)
    (answer,) = image(Needs(image="train.sif"))
    assert isinstance(answer, Answer)
    assert (answer.status, answer.words[:22]) == ("fail", "train.sif has no torch")


@pytest.mark.parametrize(
    ("built", "newest", "status", "words"),
    [
        (
            TorchBuild("2", "CUDA", "12.8"),
            12040,
            "pass",
            "the driver supports CUDA 12.4, torch is built for 12.8",
        ),
        (
            TorchBuild("2", "CUDA", "13.0"),
            12080,
            "fail",
            "CUDA 12.8, and torch is built for CUDA 13.0",
        ),
        (
            TorchBuild("2", "CUDA", "12.8"),
            None,
            "fail",
            "NVIDIA's driver is not visible in the image",
        ),
        (TorchBuild("2"), 12080, "fail", "is built for CPUs only"),
        (TorchBuild("2", "ROCm", "6.4"), None, "pass", "torch for ROCm 6.4"),
    ],
)
def test_the_driver_fits_the_build(
    built: TorchBuild, newest: int | None, status: str, words: str
) -> None:
    answer = driver(built, newest)
    assert answer.status == status
    assert words in answer.words


def test_the_version_comes_from_the_drivers_library(tmp_path: Path) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "libcuda.so.1"
    source.write_text("int cuDriverGetVersion(int *version) { *version = 12040; return 0; }\n")
    subprocess.run(["gcc", "-shared", "-o", library, source], check=True)
    assert newest_of_driver(str(library)) == 12040
    assert newest_of_driver(str(tmp_path / "absent.so")) is None
