"""Logs of TensorBoard, W&B and Lightning: of a script that hpcrun ran, and of other programs."""

import sys
from pathlib import Path

import pytest

from hpcrun.results.store import ResultsFile
from tests.results.conftest import MakeRun
from tests.results.test_mapping import mapped, metrics

WANDB = "metrics: wandb/*/run-*.wandb\nconfig: wandb/*/run-*.wandb"


def test_offline_files_of_wandb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wandb = pytest.importorskip("wandb")
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    config = {"lr": 0.1, "seed": 3, "model": {"width": 8}}
    run = wandb.init(project="p", mode="offline", dir=str(folder), config=config)
    for step in range(300):
        run.log({"loss": 1 / (step + 1), "val": {"accuracy": step}, "note": "x" * 300})
    run.finish()
    file = next(folder.glob("wandb/*/run-*.wandb"))
    # W&B writes blocks of 32 KiB, and splits records between them.
    assert file.stat().st_size > 3 * 32768
    assert mapped(tmp_path, WANDB) == 0
    found = metrics(tmp_path)
    assert found["step"].tolist() == found["val.accuracy"].tolist() == list(range(300))
    assert found["loss"].tolist() == [1 / step for step in range(1, 301)]
    with ResultsFile(tmp_path / "results.h5") as store:
        assert store.config("a") == {"lr": 0.1, "seed": 3, "model.width": 8}
        assert store.table("runs")["seed"].tolist() == [3]
    file.write_bytes(file.read_bytes()[: 2 * 32768 + 100])
    assert mapped(tmp_path, WANDB) == 0
    assert "bytes at the end are no whole record" in capsys.readouterr().out
    kept = metrics(tmp_path)["step"].tolist()
    assert kept == list(range(len(kept)))
    assert 0 < len(kept) < 300


@pytest.mark.parametrize("name", ["run-x.wandb", "events.out.tfevents.1"])
def test_without_its_library_a_log_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
) -> None:
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / name).write_bytes(b"x")
    package = "wandb" if "wandb" in name else "tensorboard"
    for module in [package, *(one for one in sys.modules if one.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, module, None)
    assert mapped(tmp_path, f"metrics: {name}") == 2
    told = capsys.readouterr().err
    assert f"`pip install {package}`" in told
    assert told.count("\n") == 1


def test_tensorboard_files(tmp_path: Path) -> None:
    tensorboard = pytest.importorskip("torch.utils.tensorboard")
    for seed in (1, 2):
        writer = tensorboard.SummaryWriter(str(tmp_path / "runs" / f"s{seed}"))
        for step in range(3):
            writer.add_scalar("train/loss", 3.0 - step, step)
        writer.add_scalar("accuracy", 0.5, 2)
        writer.close()
    assert mapped(tmp_path, "metrics: events.out.tfevents.*\nrename: {train/loss: loss}") == 0
    found = metrics(tmp_path, "s1")
    assert found["loss"].tolist() == [3.0, 2.0, 1.0]
    assert found["step"].tolist() == [0, 1, 2]
    assert found["accuracy"][2] == 0.5


def test_a_run_of_hpcrun_keeps_its_config_and_state(tmp_path: Path, make_run: MakeRun) -> None:
    for name, state in (("a", "failed"), ("b", None)):
        run = make_run(name, [9.0], state=state, seed=4, config={"train": {"lr": 0.5}})
        logs = run.path / "lightning_logs" / "version_0"
        logs.mkdir(parents=True)
        (logs / "metrics.csv").write_text("epoch,step,loss,val\n0,9,2.0,\n0,9,,0.5\n")
    text = "metrics: [metrics.jsonl, lightning_logs/*/metrics.csv]\nrows: log"
    assert mapped(tmp_path, text) == 0
    assert metrics(tmp_path)["loss"].tolist()[2:] == [9.0]
    assert metrics(tmp_path)["step"].tolist() == [9, 9, 10]
    with ResultsFile(tmp_path / "results.h5") as store:
        runs = store.table("runs")
        assert runs["state"].tolist() == [b"failed", b"unfinished"]
        assert (runs["seed"].tolist(), runs["rows"].tolist()) == ([4, 4], [3, 3])
        assert store.config("a")["train.lr"] == 0.5
    assert mapped(tmp_path, text.replace("metrics.jsonl, ", "")) == 0
    assert metrics(tmp_path)["loss"].tolist()[:1] == [2.0]
    assert len(metrics(tmp_path)) == 2
