"""The program that ``test_shipped.py`` starts: every config of configs/, in small, on two ranks.

``python -m tests.tasks.shipped FOLDER PARALLEL...`` leaves a run directory ``NAME-PARALLEL`` for each and
``outcomes.json`` in the folder.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch._dynamo
import torch._inductor.config

from hpcrun.config import file_layer, locate, override_layer, resolve, to_yaml, with_task_options
from hpcrun.run.directory import create
from hpcrun.tasks import BUILTIN, autoencoder, classifier, language_model, options_for
from tests.train.forks import fork_ranks
from tests.train.runs import play

# What every rank would import after the fork.
IMPORTED_ONCE = (autoencoder, classifier, language_model, torch._dynamo, torch._inductor)

CONFIGS = Path(__file__).parents[2] / "configs"

# fmt: off
SHORT = [
    "job.nodes=1", "job.gpus=2", "job.cpu=true", "train.steps=4", "train.batch_size=8",
    "train.log_every=1", "train.validate_every=2", "train.validate_batches=2",
    "train.timeout=30", "optim.warmup_steps=1", "checkpoint.every=2", "data.workers=0",
]
SMALL = {
    "language-model": [
        "model.layers=2", "model.heads=2", "model.width=32", "model.context=32",
        "data.max_bytes=300000",
    ],
    "autoencoder": ["model.hidden=16", "data.reconstructions=FOLDER/digits.h5"],
    "classifier": ["model.channels=4"],
}
# fmt: on


def main(folder: Path, ways: list[str]) -> None:
    """Play every config in every way of sharing the work, and write down the exit codes."""
    os.environ["XDG_CACHE_HOME"] = str(folder / "cache")
    outcomes = {}
    for path in sorted(CONFIGS.glob("*.yaml")):
        task = resolve([file_layer(path)]).task
        for way in ways:
            name = f"{path.stem}-{way}"
            overrides = [line.replace("FOLDER", str(folder)) for line in SHORT + SMALL[task]]
            layers = [file_layer(path), override_layer([*overrides, f"train.parallel={way}"])]
            config = with_task_options(resolve(layers), options_for(task), locate(layers))
            config = config.model_copy(update={"task": BUILTIN[task]})
            run = create(folder / name, to_yaml(config), {"created": time.time()})
            logs = folder / f"{name}-logs"
            logs.mkdir()
            outcomes[name] = fork_ranks(2, lambda rank, run=run: play(rank, run.path, 0), logs)
    (folder / "outcomes.json").write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
