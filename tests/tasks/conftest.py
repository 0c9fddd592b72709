"""A small library of sources, a corpus packed from it, and one thread for models this small."""

from pathlib import Path

import pytest
import torch

from hpcrun.config.tasks.language_model import LanguageModelData
from hpcrun.tasks import corpus


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Use one thread: more would wait for each other longer than they compute, mainly on a busy machine."""
    torch.set_num_threads(1)


@pytest.fixture
def library(tmp_path: Path) -> Path:
    root = tmp_path / "library"
    (root / "package").mkdir(parents=True)
    for number in range(24):
        place = root if number % 2 else root / "package"
        text = f"def double_{number}(x):\n    return {number} * x + x\n\n\n" * 8
        (place / f"module{number}.py").write_text(text)
    return root


@pytest.fixture
def packed(library: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "packed" / "corpus"
    options = LanguageModelData(max_bytes=10**6, validation_fraction=0.3)
    corpus.pack(library, folder, options)
    return folder
