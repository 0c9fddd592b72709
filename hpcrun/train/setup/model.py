"""Wrap the task's model in a trainer, and restore the newest checkpoint into it."""

from dataclasses import dataclass
from typing import Any

import torch

from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.storage.manifest import newest_manifest
from hpcrun.config import Config, changed_ways
from hpcrun.run.directory import RunError
from hpcrun.run.events import read_events
from hpcrun.train.build import build_trainer
from hpcrun.train.data.batching import accumulation_of
from hpcrun.train.data.streams import StreamState
from hpcrun.train.determinism import seed_rank
from hpcrun.train.drift import changed, environment, require_same
from hpcrun.train.early_stopping import EarlyStopping
from hpcrun.train.model.initial_weights import covers
from hpcrun.train.parallel.choose import resolve_parallel
from hpcrun.train.saving import restore
from hpcrun.train.setup.task import Context, OpenedTask
from hpcrun.train.step.trainer import DistributedAMPTrainer


@dataclass(frozen=True)
class Resumed:
    """A trainer, the checkpoint that it restored (None for a new training), and this environment.

    ``ways``: the keys of the config that may change bits, and that differ from those of the checkpoint.
    ``drift``: the parts of the environment that differ from those of the checkpoint.
    """

    trainer: DistributedAMPTrainer
    checkpoint: Restored | None
    environment: dict[str, str]
    ways: list[str]
    drift: list[str]

    @property
    def start(self) -> int:
        """The first step of this attempt."""
        return self.checkpoint.step if self.checkpoint else 0

    def extra(self, key: str, default: Any) -> Any:
        """Return an entry of the checkpoint's extra data, or ``default``."""
        return self.checkpoint.shared["extra"].get(key, default) if self.checkpoint else default

    def stream_state(self) -> StreamState | None:
        """Return the position of a stream in the checkpoint; None for a new training."""
        if self.checkpoint is None:
            return None
        own = self.checkpoint.own or {}
        return StreamState(self.extra("stream", {}), own.get("stream", {}))

    def early_stopping(self, config: Config) -> EarlyStopping:
        """Make the early stopping of ``config`` with the validations of the checkpoint."""
        early = EarlyStopping(config.train.patience, config.train.min_delta)
        early.load_state_dict(self.extra("early_stopping", early.state_dict()))
        return early


def build_model(
    context: Context, opened: OpenedTask, engine: CheckpointEngine, device: torch.device
) -> Resumed:
    """Choose the parallelism, wrap the model, and restore the newest checkpoint. Collective.

    Raises:
        UserError: the model does not fit the config, no checkpoint can be loaded, or train.deterministic is
            strict and something has changed that decides bits.
        RunError: the checkpoint of a resume has disappeared while the model was built.
        OutOfMemory: the model does not fit the device.
    """
    config, distributed = context.config, context.distributed
    earlier = _earlier_parallel(context)
    parallel = resolve_parallel(config, opened.model, distributed, context.ranks, earlier)
    with context.explain_memory(None, parallel, device, opened.model):
        with context.at("wrapping the model") as advance:
            deferred = opened.deferred is not None
            loads = opened.resumes and deferred and covers(opened.task, opened.model)
            trainer = build_trainer(
                config,
                opened.task,
                opened.model,
                distributed,
                parallel,
                opened.deferred,
                loads=loads,
                advance=advance,
            )
        with context.at("restoring"):
            restored = restore(context.run, config, trainer, engine)
    if restored is None and opened.resumes:
        raise RunError(
            f"{context.run.checkpoints}: a checkpoint was there at the start of this attempt, and is gone; "
            "start the run again"
        )
    here = environment(device, context.ranks)
    meta = {} if restored is None else restored.meta
    other = _changed_ways(meta["ways"], config, trainer) if "ways" in meta else []
    drift = changed(meta, here)
    resumed = Resumed(trainer, restored, here, other, drift)
    if config.train.deterministic == "strict":
        context.together(lambda: require_same([*other, *drift], resumed.start))
    opened.task._reached(resumed.start)
    if restored is None or restored.own is None:
        seed_rank(config.seed, distributed.rank, resumed.start)
    return resumed


def _changed_ways(
    before: dict[str, Any], config: Config, trainer: DistributedAMPTrainer
) -> list[str]:
    """Return how ``config`` differs from the ways ``before``, as far as it matters to ``trainer``."""
    several = accumulation_of(config.train, trainer.distributed.world_size) > 1
    return changed_ways(
        before,
        config,
        sharded=trainer.parallel == "fsdp",
        auto_reduces=trainer._strategy.auto_reduces if several else None,
    )


def _earlier_parallel(context: Context) -> str | None:
    """Return the parallelism of the last attempt if a step of it was saved, on rank 0; else None."""
    if context.distributed.rank != 0:
        return None
    if newest_manifest(context.run.checkpoints) is None:
        return None
    started = [event for event in read_events(context.run) if event.what == "started"]
    return started[-1].fields.get("parallel") if started else None
