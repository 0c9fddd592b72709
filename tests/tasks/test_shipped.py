"""Every shipped config trains on two ranks, with DDP and with FSDP; ``shipped.py`` runs them."""

import json
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.io.files import read_json, read_lines
from tests import jobs
from tests.train.forks import run_program

ROOT = Path(__file__).parents[2]
NAMES = sorted(path.stem for path in (ROOT / "configs").glob("*.yaml"))
WAYS = ["ddp", "fsdp"]
TOLD = {
    "language-model": {"unigram_entropy", "sample"},
    "autoencoder": {"test_loss", "test_squared_error", "reconstructions"},
    "classifier": {"test_accuracy", "confusion_matrix"},
    "token-model": {"passes", "perplexity"},
}


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_program("tests.tasks.shipped", tmp_path_factory.mktemp("shipped"))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_a_shipped_config_trains_and_reports(played: Path, name: str, way: str) -> None:
    said = (played / f"{name}-{way}-logs" / "rank-0.log").read_text()
    codes = json.loads((played / "outcomes.json").read_text())
    assert codes[f"{name}-{way}"] == [[0, 0]], said
    run = RunDirectory(played / f"{name}-{way}")
    result = read_json(run.result) or {}
    assert result["state"] == "finished"
    assert "report_error" not in result
    assert any(told <= result["report"].keys() for told in TOLD.values())
    lines = [line for line in read_lines(run.metrics) if "loss" in line]
    assert len(lines) == 4
    # The model's arithmetic can be counted.
    assert all(line["mfu"] > 0 for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_both_ways_of_sharing_the_work_learn_the_same(played: Path, name: str) -> None:
    def losses(way: str) -> list[float]:
        lines = read_lines(RunDirectory(played / f"{name}-{way}").metrics)
        return [line["loss"] for line in lines if "loss" in line]

    assert losses("fsdp") == pytest.approx(losses("ddp"), rel=1e-3)


def test_a_stop_changes_no_bit_although_codes_are_drawn_at_random(played: Path) -> None:
    codes = json.loads((played / "outcomes.json").read_text())
    assert codes["autoencoder-stopped"] == [[75, 75], [0, 0]]
    undisturbed = jobs.final_state(RunDirectory(played / "autoencoder-ddp"))
    assert undisturbed
    assert jobs.final_state(RunDirectory(played / "autoencoder-stopped")) == undisturbed
