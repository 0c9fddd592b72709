"""Puts one rank's training together from the config, runs it, and writes how it ended."""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import Dataset, default_collate

from hpcrun.checkpoint.outcome import Restored
from hpcrun.checkpoint.sharded.collective import Together
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.cluster.deadline import end_time, query_end_time
from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.launchers import in_local_cluster, job_id
from hpcrun.config import Config, differing, training_fingerprint, ways
from hpcrun.errors import UserError
from hpcrun.lifecycle.agreement import StopAgreement
from hpcrun.lifecycle.rank.deadline import DeadlineWatch
from hpcrun.lifecycle.signals import StopFlag, StopReason
from hpcrun.run.commits import newest_commit
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, note, read_events
from hpcrun.train.build import build_trainer
from hpcrun.train.checkpoint_setup import build_engine, build_interval, restore
from hpcrun.train.data.batches import length, require_trainable, training_steps
from hpcrun.train.data.batching import Batching, accumulation_of
from hpcrun.train.data.streams import StreamState
from hpcrun.train.data.workers import worker_processes
from hpcrun.train.determinism import choose_kernels, explain_refusals, seed_alike, seed_rank
from hpcrun.train.evaluation.best import Weights, put_best_back
from hpcrun.train.evaluation.early_stopping import EarlyStopping
from hpcrun.train.evaluation.validate import validate
from hpcrun.train.evaluation.validation_data import ValidationData
from hpcrun.train.health import flight_recorder
from hpcrun.train.health.nonfinite import NonFiniteWatch, samples_of
from hpcrun.train.health.out_of_memory import explaining, usage
from hpcrun.train.health.watchdog import At, watching
from hpcrun.train.loop import Loop
from hpcrun.train.metrics.log import MetricsLog, measure
from hpcrun.train.metrics.profiling import Profile
from hpcrun.train.metrics.sinks import build_sinks
from hpcrun.train.optimizer import learning_rate_lines
from hpcrun.train.parallel import process_group
from hpcrun.train.parallel.choose import resolve_parallel
from hpcrun.train.parallel.collective import together
from hpcrun.train.phase import PREPARING, TRAINING, Position
from hpcrun.train.report import finished, stopped
from hpcrun.train.saving import Saver
from hpcrun.train.step.micro_batches import MicroBatchStep
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import Task, load_task
from hpcrun.train.task_checks import require_model

_PREPARE_AT_MOST = 86400.0
"""Seconds without a watchdog: a download may take hours, and what has hung for a day will not come."""


@explain_refusals()
def train(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    distributed: DistributedConfig,
    flag: StopFlag,
    position: Position,
) -> int:
    """Train until the end or an agreed stop; return the exit code (see exitcodes).

    Raises:
        UserError: the task, its data or the description of the ranks is wrong.
        Exception: whatever the task or a peer's end raises.
    """
    choose_kernels(config.train.deterministic)
    flight_recorder.turn_on()
    distributed = process_group.join_run(
        distributed, run, attempt, timeout=config.train.timeout, interface=config.job.interface
    )
    group = process_group.control_group(distributed)
    with watching(run, attempt, config, distributed, position) as at:
        code = _train(run, attempt, config, distributed, flag, position, group, at)
        # Together: srun ends the others as soon as one task exits with another code than 0.
        with at("leaving"):
            if group is not None:
                dist.barrier(group=group)
        process_group.cleanup_distributed()
    return code


def _train(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    distributed: DistributedConfig,
    flag: StopFlag,
    position: Position,
    group: Any,
    at: At,
) -> int:
    with at("importing the task"):
        task = together(lambda: load_task(config), rank=distributed.rank, group=group)
    _prepare_data(task, distributed, group, at)
    with at("building the model and its data"):
        model, dataset, validation_set = together(
            lambda: _open_task(task, config, distributed), rank=distributed.rank, group=group
        )
    # While all have just met: making its group waits less long than the watchdog does.
    engine = build_engine(run, attempt, config, distributed, group)
    device = process_group.select_device(distributed)
    measured = measure(config, task, model, device)
    parallel = resolve_parallel(config, model, distributed, group, _trained_by(run, distributed))

    def short_of_memory(batching: Batching | None) -> contextlib.AbstractContextManager[None]:
        ranks, cuda = distributed.world_size, device.type == "cuda"
        used = usage(config, batching, ranks=ranks, parallel=parallel, cuda=cuda)
        logs = run.attempt_logs(attempt.job, attempt.restart)
        return explaining(used, logs, distributed.rank)

    with short_of_memory(None):
        with at("wrapping the model"):
            trainer = build_trainer(config, task, model, distributed, parallel)
        with at("restoring"):
            restored = restore(run, config, trainer, engine)
    start = position.start = restored.step if restored else 0
    task._reached(start)
    if restored is None or restored.own is None:
        seed_rank(config.seed, distributed.rank, start)
    early = EarlyStopping(config.train.patience, config.train.min_delta)
    if restored is not None:
        early.load_state_dict(restored.shared["extra"].get("early_stopping", early.state_dict()))
    steps = range(start, early.end(config.train.steps))
    accumulation = accumulation_of(config.train, distributed.world_size)
    # Not the task's where it has none of its own: a loader process may be given a copy of all of it.
    collate = default_collate if type(task).collate is Task.collate else task.collate
    batches = together(
        lambda: training_steps(
            dataset,
            steps,
            rank=distributed.rank,
            world_size=distributed.world_size,
            batch_size=config.train.batch_size,
            accumulation=accumulation,
            seed=config.seed,
            workers=worker_processes(config, os.environ),
            pin_memory=trainer.device.type == "cuda",
            saved=_stream_state(restored),
            uneven=config.train.uneven,
            prefetch=config.data.prefetch,
            collate=collate,
        ),
        rank=distributed.rank,
        group=group,
    )
    take = together(
        lambda: MicroBatchStep(trainer, task, batches.batching, measured.loss),
        rank=distributed.rank,
        group=group,
    )
    if trainer.is_main_process:
        # Only now: the data may refuse to go on from there.
        _announce(run, attempt, config, restored, start, trainer)
        rates = learning_rate_lines(config, trainer.optimizer)
        for line in (*batches.batching.lines(config.train.steps), *rates):
            print(f"hpcrun: {line}", flush=True)
    sinks = together(
        lambda: build_sinks(run, config, start) if trainer.is_main_process else None,
        rank=distributed.rank,
        group=group,
    )
    metrics = MetricsLog(
        config,
        task,
        trainer,
        batches.batching,
        measured,
        sinks,
        group=group,
        restart=attempt.restart,
    )
    if restored is not None:
        metrics.restore(restored.shared["extra"].get("metrics", []))
    saver = Saver(
        run,
        attempt,
        trainer,
        engine,
        interval=build_interval(run, config, distributed, group, lambda: saver.costs),
        batches=batches,
        early=early,
        metrics=metrics,
        meta={
            "fingerprint": training_fingerprint(config),
            "torch": torch.__version__,
            "ways": ways(config),
        },
        saved=restored.step if restored else None,
    )
    deadline = _watch_deadline(config, trainer)

    def reason_to_stop() -> StopReason:
        late = deadline is not None and deadline.due()
        return max(flag.reason, StopReason.DEADLINE if late else StopReason.NONE)

    validation = (
        None
        if validation_set is None
        else ValidationData(
            validation_set,
            rank=distributed.rank,
            world_size=distributed.world_size,
            batch_size=config.train.batch_size,
            accumulation=accumulation,
            limit=config.train.validate_batches,
            same_count=trainer.forward_is_collective,
            workers=worker_processes(config, os.environ),
            prefetch=config.data.prefetch,
            pin_memory=trainer.device.type == "cuda",
            collate=collate,
        )
    )

    def validation_loss() -> float | None:
        return None if validation is None else validate(trainer, task, validation, group=group)

    loop = Loop(
        config=config,
        steps=steps,
        batches=measured.watch.batches(batches),
        take=take,
        agreement=StopAgreement(group, config.train.stop_check_every),
        reason_to_stop=reason_to_stop,
        validate=validation_loss,
        early=early,
        metrics=metrics,
        saver=saver,
        nonfinite=NonFiniteWatch(
            run,
            attempt,
            config,
            trainer,
            start=start,
            rank=distributed.rank,
            group=group,
            samples=samples_of(dataset, batches.batching, config.seed),
        ),
        profile=Profile(
            run,
            config.train.profile,
            start,
            rank=distributed.rank,
            device=trainer.device,
            watch=measured.watch,
            position=position,
        ),
        position=position,
    )
    with short_of_memory(batches.batching), at(TRAINING):
        measured.watch.start()
        try:
            stop = loop.run()
        finally:
            metrics.flush()
    with at("ending"):
        loop.agreement.settle()
        loop.batches.close()
    seen = early.seen == early.end(config.train.steps)
    with at("validating"):
        loss = early.loss if stop or seen else validation_loss()
        if validation is not None:
            validation.close()
    if stop:
        code = stopped(run, attempt, stop, saver, trainer)
        # Before any rank leaves: srun ends rank 0 soon after another has left with an exit code, and an
        # upload takes longer than that.
        with at("sending the metrics"):
            metrics.close()
        return code
    ranks = Together(distributed.rank, distributed.world_size, group)

    def best(last: Weights) -> Weights:
        if not config.checkpoint.keep_best:
            return last
        store = CheckpointStore(run.checkpoints, attempt.owner)
        with at("restoring the best weights"):
            return put_best_back(trainer, engine, store, early, last, ranks)

    with at("making the report"):
        code = finished(run, attempt, config, task, trainer, saver, early, loss, best, ranks)
    with at("sending the metrics"):
        metrics.close()
    return code


def _open_task(
    task: Task, config: Config, distributed: DistributedConfig
) -> tuple[nn.Module, "Dataset[Any]", "Dataset[Any] | None"]:
    """The task's model and its two datasets, of which none is empty or cannot be entered again."""
    # Alike on every rank, so that the weights are the same before any is compared.
    seed_alike(config.seed)
    model = task.build_model()
    ranks, cuda = distributed.world_size, bool(distributed.device_ids)
    require_model(model, task, config, ranks=ranks, cuda=cuda)
    dataset, validation_set = task.train_dataset(), task.validation_dataset()
    workers = worker_processes(config, os.environ)
    require_trainable(dataset, distributed.world_size, workers)
    if validation_set is not None:
        length(validation_set)
    elif config.train.patience is not None:
        raise UserError(
            f"train.patience: {type(task).__name__} has no validation set to judge by; give it one, or "
            "leave patience out"
        )
    elif distributed.rank == 0:
        for key in _in_vain(config):
            print(
                f"hpcrun: {key}: has no effect: {type(task).__name__} has no validation set",
                flush=True,
            )
    return model, dataset, validation_set


def _in_vain(config: Config) -> list[str]:
    """What is asked for that needs validations."""
    wanted = {
        "train.validate_every": config.train.validate_every,
        "train.validate_batches": config.train.validate_batches,
        "checkpoint.keep_best": config.checkpoint.keep_best,
    }
    return [key for key, value in wanted.items() if value]


def _prepare_data(task: Task, distributed: DistributedConfig, group: Any, at: At) -> None:
    """Rank 0 makes the data, however long it takes: meanwhile the other ranks' collectives wait longer."""
    work = task.prepare if distributed.rank == 0 else _nothing
    with process_group.waiting_at_least(_PREPARE_AT_MOST), at(PREPARING):
        together(work, rank=distributed.rank, group=group)


def _stream_state(restored: Restored | None) -> StreamState | None:
    """Where the checkpoint says that a stream stood."""
    if restored is None:
        return None
    return StreamState(
        restored.shared["extra"].get("stream", {}), (restored.own or {}).get("stream", {})
    )


def _nothing() -> None:
    """What the other ranks do while rank 0 prepares."""


def _trained_by(run: RunDirectory, distributed: DistributedConfig) -> str | None:
    """How the ranks of the attempt before shared the work, if anything of it was saved; rank 0 knows."""
    if distributed.rank != 0:
        return None
    if newest_commit(run) is None:
        return None
    started = [event for event in read_events(run) if event.what == "started"]
    return started[-1].fields.get("parallel") if started else None


def _announce(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    restored: Restored | None,
    start: int,
    trainer: DistributedAMPTrainer,
) -> None:
    for line in restored.notes if restored else ():
        print(f"hpcrun: {line}", flush=True)
    if restored is not None and restored.own is None:
        line = (
            "random states are derived anew from seed, rank and step; the order of samples goes on"
        )
        print(f"hpcrun: {line}", flush=True)
    changed = differing(restored.meta.get("ways", {}), ways(config)) if restored else []
    if restored is not None and "ways" in restored.meta and changed:
        line = (
            f"other than when step {start} was saved: {'; '.join(changed)}; the samples and the sums over "
            "them stay the same, but not the bits, nor where random draws such as dropout's fall"
        )
        print(f"hpcrun: {line}", flush=True)
    ranks = trainer.distributed.world_size
    where = f"resumed from step {start}" if restored else "starting at step 0"
    print(f"hpcrun: {run.name}: {where}, {ranks} {'rank' if ranks == 1 else 'ranks'}", flush=True)
    note(run, "started", attempt, step=start, ranks=ranks, parallel=trainer.parallel)


def _watch_deadline(config: Config, trainer: DistributedAMPTrainer) -> DeadlineWatch | None:
    if not trainer.is_main_process:
        return None
    job = job_id(os.environ)

    def ask() -> float | None:
        # Slurm itself first: the variable does not follow an extended limit.
        found = None if job is None or in_local_cluster(os.environ) else query_end_time(job)
        return found or end_time(os.environ)

    return DeadlineWatch(ask, lead=float(config.job.signal_lead))
