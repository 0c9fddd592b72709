"""Logs of TensorBoard, W&B and Lightning: of a script that hpcrun ran, and of other programs."""

import json
import struct
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hpcrun.results.store import ResultsFile
from tests.results.conftest import MakeRun
from tests.results.test_mapping import mapped, metrics


def wandb_file(path: Path, steps: int, **config: Any) -> None:
    """Write the file of an offline run as W&B does: protobuf records in blocks of 32 KiB."""
    messages = pytest.importorskip("wandb.proto.wandb_internal_pb2")
    records = [messages.Record() for _ in range(steps + 1)]
    for key, value in config.items():
        records[0].run.config.update.add(key=key, value_json=json.dumps(value))
    for step, record in enumerate(records[1:]):
        row = {"_step": step, "_timestamp": 1e9 + step, "loss": 1 / (step + 1), "note": "x" * 300}
        for name, value in row.items():
            record.history.item.add(nested_key=[name], value_json=json.dumps(value))
        record.history.item.add(nested_key=["val", "accuracy"], value_json="NaN")
    data = b":W&B\xe1\xbe\x00"
    for record in records:
        rest, first = record.SerializeToString(), True
        while rest or first:
            left = 32768 - len(data) % 32768
            if left < 7:
                data += bytes(left)
                continue
            chunk, rest = rest[: left - 7], rest[left - 7 :]
            kind = (1 if first else 4) if not rest else (2 if first else 3)
            crc = zlib.crc32(bytes([kind]) + chunk)
            data, first = data + struct.pack("<IHB", crc, len(chunk), kind) + chunk, False
    path.parent.mkdir(parents=True)
    path.write_bytes(data)


WANDB = "metrics: wandb/*/run-*.wandb\nconfig: wandb/*/run-*.wandb"


def test_offline_files_of_wandb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "runs" / "a" / "wandb" / "offline-run-1-x" / "run-x.wandb"
    wandb_file(file, 300, lr=0.1, seed=3, model={"width": 8})
    (file.parents[1] / "latest-run").symlink_to(file.parent)
    assert len(file.read_bytes()) > 3 * 32768
    assert mapped(tmp_path, WANDB) == 0
    found = metrics(tmp_path)
    assert found["step"].tolist() == list(range(300))
    assert found["loss"].tolist() == [1 / step for step in range(1, 301)]
    assert np.isnan(found["val.accuracy"]).all()
    with ResultsFile(tmp_path / "results.h5") as store:
        assert store.config("a") == {"lr": 0.1, "seed": 3, "model.width": 8}
        assert store.table("runs")["seed"].tolist() == [3]
    file.write_bytes(file.read_bytes()[:-10])
    assert mapped(tmp_path, WANDB) == 0
    assert "bytes at the end are no whole record" in capsys.readouterr().out
    assert metrics(tmp_path)["step"].tolist() == list(range(299))


def test_wandb_itself_writes_such_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    folder = tmp_path / "runs" / "a"
    folder.mkdir(parents=True)
    run = wandb.init(project="p", mode="offline", dir=str(folder), config={"lr": 0.1})
    for step in range(3):
        run.log({"loss": 3.0 - step, "val": {"accuracy": step}})
    run.finish()
    assert mapped(tmp_path, WANDB) == 0
    assert metrics(tmp_path)["loss"].tolist() == [3.0, 2.0, 1.0]
    assert metrics(tmp_path)["val.accuracy"].tolist() == [0, 1, 2]


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
