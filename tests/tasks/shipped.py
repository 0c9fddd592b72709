"""The program that ``test_shipped.py`` starts: every config of configs/, in small, on two ranks.

``python -m tests.tasks.shipped FOLDER`` leaves a run directory ``NAME-WAY`` for each and ``outcomes.json``
in the folder: the exit codes of each attempt.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import sklearn.datasets
import torch._dynamo
import torch._inductor.config
from torch import Tensor, nn

from hpcrun import get_rank
from hpcrun.config import (
    Config,
    file_layer,
    locate,
    override_layer,
    resolve,
    to_yaml,
    with_task_options,
)
from hpcrun.run.directory import create
from hpcrun.tasks import (
    BUILTIN,
    autoencoder,
    classifier,
    language_model,
    options_for,
    token_model,
)
from hpcrun.tasks.tokens.__main__ import main as make_tokens
from tests.train.forks import fork_ranks
from tests.train.runs import play

# What every rank would import after the fork.
IMPORTED_ONCE = (
    autoencoder,
    classifier,
    language_model,
    token_model,
    sklearn.datasets,
    torch._dynamo,
)

CONFIGS = Path(__file__).parents[2] / "configs"

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
    "autoencoder": ["model.hidden=16", "data.reconstructions=FOLDER/digits.h5"],
    "classifier": ["model.channels=4"],
    "token-model": [
        "model.layers=2", "model.heads=2", "model.width=32", "model.context=32",
        "data.paths=[FOLDER/web, FOLDER/code]", "data.weights=[3, 1]", "data.boundaries=attention",
        "train.micro_batch=null",
    ],
}
# fmt: on


WAYS = {
    "ddp": ["train.parallel=ddp"],
    # Recomputed activations change no bit, so this setting is tested along the way.
    "fsdp": ["train.parallel=fsdp", "train.activation_checkpointing=full"],
}


class StoppedAutoencoder(autoencoder.Autoencoder):
    """Sends rank 1 a SIGTERM in its second step; the first asks for the loss twice."""

    def loss(self, model: nn.Module, batch: autoencoder.Batch) -> Tensor:
        self.calls = getattr(self, "calls", 0) + model.training
        if self.calls == 3 and model.training and get_rank() == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


def small(path: Path, folder: Path, overrides: list[str]) -> Config:
    """The config at ``path``, for two ranks and a few seconds."""
    task = resolve([file_layer(path)]).task
    given = [line.replace("FOLDER", str(folder)) for line in SHORT + SMALL[task]]
    layers = [file_layer(path), override_layer([*given, *overrides])]
    config = with_task_options(resolve(layers), options_for(task), locate(layers))
    return config.model_copy(update={"task": BUILTIN[task]})


def run(folder: Path, name: str, config: Config) -> list[list[int]]:
    """Run the config until it no longer asks to be continued, and return the exit codes of each attempt."""
    run = create(folder / name, to_yaml(config), {"created": time.time()})
    logs = folder / f"{name}-logs"
    logs.mkdir()
    attempts: list[list[int]] = []
    while not attempts or attempts[-1] == [75, 75]:
        restart = len(attempts)
        attempts.append(fork_ranks(2, lambda rank, n=restart: play(rank, run.path, n), logs))
    return attempts


def main(folder: Path) -> None:
    """Run every config with every kind of parallelism, and one that is stopped on its way."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    for name, pattern in (("web", "*i*.py"), ("code", "*.py")):
        texts = sorted(map(str, (CONFIGS.parent / "hpcrun" / "tasks").glob(pattern)))
        assert make_tokens([str(folder / name), *texts, "--validation-fraction=0.2"]) == 0
    outcomes = {}
    for path in sorted(CONFIGS.glob("*.yaml")):
        for way, overrides in WAYS.items():
            name = f"{path.stem}-{way}"
            outcomes[name] = run(folder, name, small(path, folder, overrides))
    stopped = small(CONFIGS / "autoencoder.yaml", folder, WAYS["ddp"])
    stopped = stopped.model_copy(update={"task": "tests.tasks.shipped:StoppedAutoencoder"})
    outcomes["autoencoder-stopped"] = run(folder, "autoencoder-stopped", stopped)
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
