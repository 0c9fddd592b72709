"""Open the task, build its model and data on all ranks, and restore the newest checkpoint."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import Dataset, default_collate

from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.state.generators import seed_all
from hpcrun.config import Config, changed_ways
from hpcrun.devices.accelerator import is_accelerator
from hpcrun.errors import UserError, error_on_all_ranks
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.journal.events import Started
from hpcrun.run.journal.journal import Journal
from hpcrun.storage.manifest import has_commit, newest_manifest
from hpcrun.train.build import build_trainer
from hpcrun.train.data.batches import (
    Steps,
    length,
    require_any_ranks,
    require_trainable,
    training_steps,
)
from hpcrun.train.data.batching import accumulation_of, worker_processes
from hpcrun.train.data.streams import StreamState
from hpcrun.train.determinism import (
    changed,
    environment,
    explain_refusals,
    require_same,
    seed_for_datasets,
    seed_rank,
)
from hpcrun.train.health.out_of_memory import explaining
from hpcrun.train.health.watchdog import At
from hpcrun.train.model.checks import require_model
from hpcrun.train.model.deferred import Deferred, build_deferred, build_drawn
from hpcrun.train.model.initial_weights import covers, load_initial_weights
from hpcrun.train.parallel import process_group
from hpcrun.train.parallel.choose import Parallel, resolve_fsdp, resolve_parallel
from hpcrun.train.position import PREPARING
from hpcrun.train.saving import restore
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import Task, load_task

T = TypeVar("T")


@dataclass(frozen=True)
class Context:
    """The run, attempt, config, place, watchdog, and all ranks (with a control group) of a training."""

    run: RunDirectory
    attempt: Attempt
    config: Config
    distributed: DistributedConfig
    ranks: Ranks
    at: At

    def together(self, compute: Callable[[], T]) -> T:
        """Run ``compute`` on every rank; if it fails on one rank, raise on all of them. Collective."""

        def explained() -> T:
            with explain_refusals():
                return compute()

        return self.ranks.together(explained)

    def explain_memory(self, parallel: Parallel) -> AbstractContextManager[None]:
        """Add advice to an out-of-memory error in the block."""
        return explaining(self.config, parallel, self.distributed.world_size)


_MAX_PREPARE = 86400.0
"""Seconds for ``Task.prepare`` without a watchdog: a download may take hours, but not more than a day."""


@dataclass(frozen=True)
class OpenedTask:
    """A task with its model, on the CPU, and its datasets; no validation dataset: None."""

    task: Task
    model: nn.Module
    dataset: "Dataset[Any]"
    validation_set: "Dataset[Any] | None"
    deferred: Deferred | None = None
    """The model's parameters on the meta device, and their values on rank 0."""
    resumes: bool = False
    """True if a checkpoint exists at the start."""

    @property
    def collate(self) -> Callable[[list[Any]], Any]:
        """The function that makes a batch from samples."""
        # Not the task's method unless it is overridden: a loader process gets a copy of the whole task.
        overridden = type(self.task).collate is not Task.collate
        return self.task.collate if overridden else default_collate


def open_task(context: Context) -> OpenedTask:
    """Import the task, prepare its data on rank 0, and build its model and datasets. Collective.

    Raises:
        UserError: the task, its model or its data cannot be used.
    """
    with context.at("importing the task"):
        task = context.together(lambda: load_task(context.config))
    work = task.prepare if context.distributed.rank == 0 else lambda: None
    # Collectives of the other ranks wait while rank 0 prepares.
    with process_group.waiting_at_least(_MAX_PREPARE), context.at(PREPARING):
        context.together(work)
    with context.at("building the model and its data"):
        config, distributed = context.config, context.distributed
        resumes = context.ranks.from_rank_0(lambda: has_commit(context.run))
        # Rank 0 may build alone.
        with process_group.waiting_at_least(config.train.hang_start):
            model, deferred = make_model(task, config, distributed, context.ranks, resumes=resumes)
        opened = context.together(
            lambda: open_on_rank(task, config, distributed, model, resumes=resumes)
        )
        return replace(opened, deferred=deferred)


def make_model(
    task: Task,
    config: Config,
    distributed: DistributedConfig,
    ranks: Ranks,
    *,
    resumes: bool = False,
) -> tuple[Any, Deferred | None]:
    """Return the result of ``task.build_model()``, and its parameters if only rank 0 has weights. Collective.

    ``resumes``: a checkpoint follows (see `covers`).

    Raises:
        UserError: ``fsdp.deferred_init`` is true, and the build cannot be deferred.
    """

    def make() -> Any:
        # The same seed on every rank, so that all ranks start with the same weights.
        seed_all(config.seed)
        with explain_refusals():
            return _build(task, config, resumes=resumes)

    wanted = config.train.parallel == "fsdp" and config.fsdp.deferred_init is not False
    if distributed.world_size == 1 or not wanted:
        return ranks.together(make), None
    if task.draws_weights and config.train.init_from is None:
        drawn = ranks.together(lambda: build_drawn(make))
        if drawn[1] is not None:
            return drawn
    model, deferred, reason = build_deferred(make, ranks)
    if reason:
        where = f"fsdp.deferred_init: {type(task).__name__}.build_model()"
        if config.fsdp.deferred_init is True:
            text = (
                f"{where} cannot be deferred: {reason}; change it, or set fsdp.deferred_init=false"
            )
            raise error_on_all_ranks(text, ranks.rank)
        if ranks.rank == 0:
            print(f"hpcrun: {where} runs on every rank in full: {reason}", flush=True)
    return model, deferred


def _build(task: Task, config: Config, *, resumes: bool) -> Any:
    model = task.build_model()
    source = config.train.init_from
    if source is None or not isinstance(model, nn.Module):
        return model
    if not (resumes and covers(task, model)):
        task._require_weights_of(source)
        load_initial_weights(model, source, config.train.init_rename)
    return model


def open_on_rank(
    task: Task, config: Config, distributed: DistributedConfig, model: Any, *, resumes: bool
) -> OpenedTask:
    """Check ``model``, and make the datasets of ``task`` on this rank.

    Raises:
        UserError: the model or the data cannot be used.
    """
    ranks = distributed.world_size
    require_model(model, task)
    # The draws of the datasets do not depend on those of the model.
    seed_for_datasets(config.seed)
    dataset, validation_set = task.train_dataset(), task.validation_dataset()
    workers = worker_processes(config, os.environ, task.loader_processes)
    require_trainable(dataset, ranks, workers)
    if config.job.elastic:
        require_any_ranks(dataset, config)
    if validation_set is not None:
        length(validation_set)
    elif config.train.patience is not None:
        raise UserError(
            f"train.patience: {type(task).__name__} has no validation set; add one, or remove "
            "train.patience"
        )
    return OpenedTask(task, model, dataset, validation_set, resumes=resumes)


@dataclass(frozen=True)
class Resumed:
    """A trainer, the checkpoint that it restored (None for a new training), and this environment.

    ``config``: with the choices of ``auto`` in ``fsdp``. ``parallelism``: its keys that may change bits, and
    that differ from those of the checkpoint. ``drift``: the parts of the environment that differ from those
    of the checkpoint.
    """

    trainer: DistributedAMPTrainer
    checkpoint: Restored | None
    environment: dict[str, str]
    config: Config
    parallelism: list[str]
    drift: list[str]

    @property
    def start(self) -> int:
        """The first step of this attempt."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def saved(self) -> int | None:
        """The newest step on disk; None if there is none."""
        return self.checkpoint.committed if self.checkpoint else None

    def extra(self, key: str, default: Any) -> Any:
        """Return an entry of the checkpoint's extra data, or ``default``."""
        return self.checkpoint.shared["extra"].get(key, default) if self.checkpoint else default

    def stream_state(self) -> StreamState | None:
        """Return the position of a stream in the checkpoint; None for a new training."""
        if self.checkpoint is None:
            return None
        own = self.checkpoint.own or {}
        return StreamState(self.extra("stream", {}), own.get("stream", {}))


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
    earlier, shards = _earlier_choices(context)
    parallel = resolve_parallel(config, opened.model, distributed, context.ranks, earlier)
    config = resolve_fsdp(config, opened.model, distributed, context.ranks, parallel, shards)
    with replace(context, config=config).explain_memory(parallel):
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
    resumed = Resumed(trainer, restored, here, config, other, drift)
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
    several = accumulation_of(config, trainer.distributed.world_size) > 1
    return changed_ways(
        before,
        config,
        sharded=trainer.parallel == "fsdp",
        auto_reduces=trainer._strategy.auto_reduces if several else None,
    )


def _earlier_choices(context: Context) -> tuple[str | None, str | None]:
    """Return the last attempt's parallelism if a step was saved, and its shards if it had as many ranks.

    Only rank 0 gets an answer.
    """
    main = context.distributed.rank == 0
    newest = newest_manifest(context.run.checkpoints) if main else None
    if newest is None:
        return None, None
    started = Journal(context.run).read().newest(Started)
    same = newest.world_size == context.distributed.world_size
    shard = newest.meta.get("ways", {}).get("fsdp.shard") if same else None
    return started.parallel if started else None, shard


def build_batches(context: Context, opened: OpenedTask, resumed: Resumed, steps: range) -> Steps:
    """Make this rank's micro-batches for ``steps``. Collective.

    Raises:
        UserError: the data cannot be divided into batches, or cannot resume.
    """
    config, distributed = context.config, context.distributed
    return context.together(
        lambda: training_steps(
            opened.dataset,
            steps,
            rank=distributed.rank,
            world_size=distributed.world_size,
            batch_size=config.train.batch_size,
            accumulation=accumulation_of(config, distributed.world_size),
            seed=config.seed,
            workers=worker_processes(config, os.environ, opened.task.loader_processes),
            pin_memory=is_accelerator(resumed.trainer.device),
            saved=resumed.stream_state(),
            prefetch=config.data.prefetch,
            collate=opened.collate,
        )
    )
