"""Every shipped config trains in small on two ranks, with DDP and with FSDP."""

import time
from pathlib import Path

import numpy as np
import pytest

from examples import classifier
from hpcrun.config import (
    Config,
    file_layer,
    locate,
    override_layer,
    resolve,
    to_yaml,
    with_task_options,
)
from hpcrun.config.tasks import BUILTIN, options_for
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import read_json, read_lines
from hpcrun.tasks import language_model
from tests.support.on_ranks import forked
from tests.support.training.forks import fork_ranks
from tests.support.training.runs import play_rank

# Modules that every rank would import after the fork.
IMPORTED_ONCE = (classifier, language_model)

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "configs"
NAMES = sorted(path.stem for path in CONFIGS.glob("*.yaml"))
REPORTED = {
    "language-model": {"unigram_entropy", "sample"},
    "autoencoder": {"test_loss", "test_squared_error"},
    "classifier": {"test_accuracy", "confusion_matrix"},
    "tokens": {"perplexity"},
}

# fmt: off
SHORT = [
    "job.nodes=1", "job.gpus=2", "job.cpu=true", "train.steps=4", "train.batch_size=8",
    "train.log_every=1", "train.validate_every=2", "train.validate_batches=2",
    "train.timeout=30", "watch.peak_flops=1e11", "optim.warmup_steps=1", "checkpoint.every=2",
    "data.workers=0",
]
SMALL = {
    "language-model": [
        "model.layers=2", "model.heads=2", "model.width=32", "model.context=32",
        "data.max_bytes=300000",
    ],
    "examples.autoencoder:Autoencoder": ["model.hidden=16"],
    "examples.classifier:Classifier": ["model.channels=4"],
    "examples.bdh:BDHTask": [
        "model.layers=2", "model.heads=2", "model.width=32", "model.context=32",
        "model.neurons=64", "data.max_bytes=300000",
    ],
}
# A byte is a token, and a line is a document.
TOKENS = [
    "data.tokens=[FOLDER/web, FOLDER/code, FOLDER/web]", "data.dtype=uint16",
    "data.validation_tokens=[FOLDER/code]", "model.vocabulary=256", "model.document_end=10",
    "model.kv_heads=1", "model.mlp_width=64", "train.micro_batch=null", "train.compile=false",
]
# fmt: on

WAYS = {
    "ddp": ["train.parallel=ddp"],
    # Recomputed activations change no bit, so this setting is tested along the way.
    "fsdp": ["train.parallel=fsdp", "train.activation_checkpointing=full"],
}


def small(folder: Path, name: str, way: str) -> Config:
    """Return a shipped config for two ranks and a few seconds."""
    path = CONFIGS / f"{name}.yaml"
    shipped = resolve([file_layer(path)])
    own = SHORT + SMALL[shipped.task] + (TOKENS if "tokens" in shipped.data.own else [])
    given = [line.replace("FOLDER", str(folder)) for line in own]
    layers = [file_layer(path), override_layer([*given, *WAYS[way]])]
    config, options = resolve(layers), options_for(shipped.task)
    if options is not None:
        config = with_task_options(config, options, locate(layers))
    return config.model_copy(update={"task": BUILTIN.get(shipped.task, shipped.task)})


def play(folder: Path, name: str, config: Config) -> tuple[RunDirectory, list[int], str]:
    """Run a config; return the run, exit codes and output."""
    if "autoencoder" in config.task or "classifier" in config.task:
        # Each rank would import this module after the fork.
        import sklearn.datasets  # noqa: F401
    run = create(folder / name, to_yaml(config), {"created": time.time()})
    logs = folder / f"{name}-logs"
    logs.mkdir()
    codes = fork_ranks(2, lambda rank: play_rank(rank, run.path, 0), logs)
    return run, codes, (logs / "rank-0.log").read_text()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep what tasks prepare in the folder of the test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_tokens(folder: Path) -> None:
    """Write two files of tokens."""
    for name, pattern in (("web", "*i*.py"), ("code", "*.py")):
        texts = [path.read_bytes() for path in sorted((ROOT / "hpcrun" / "train").rglob(pattern))]
        np.frombuffer(b"".join(texts), np.uint8).astype("<u2").tofile(folder / name)


@pytest.mark.parametrize("name", NAMES)
@forked
def test_a_shipped_config_learns_the_same_with_ddp_and_fsdp(tmp_path: Path, name: str) -> None:
    write_tokens(tmp_path)
    losses = []
    for way in WAYS:
        run, codes, said = play(tmp_path, way, small(tmp_path, name, way))
        assert codes == [0, 0], said
        result = read_json(run.result) or {}
        assert result["state"] == "finished"
        assert "report_error" not in result
        assert any(told <= result["report"].keys() for told in REPORTED.values())
        lines = [line for line in read_lines(run.metrics) if "loss" in line]
        assert len(lines) == 4
        # The model's arithmetic can be counted.
        assert all(line["mfu"] > 0 for line in lines)
        losses.append([line["loss"] for line in lines])
    ddp, fsdp = losses
    assert fsdp == pytest.approx(ddp, rel=1e-3)
