"""Put one rank's training together from the config, run it, and report its end."""

import torch.distributed as dist

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.config import Config
from hpcrun.ranks.agreement import StopAgreement
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.signals import StopFlag, StopReason
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.train.checkpoint_setup import build_engine
from hpcrun.train.determinism import announce_order, choose_kernels, explain_refusals
from hpcrun.train.evaluation.best import Weights, put_best_back
from hpcrun.train.health import compilation, flight_recorder
from hpcrun.train.health.watchdog import watching
from hpcrun.train.loop import Loop
from hpcrun.train.metrics.log import measure
from hpcrun.train.parallel import process_group
from hpcrun.train.phase import TRAINING, VALIDATING, Position
from hpcrun.train.report import finished, stopped
from hpcrun.train.setup.context import Context
from hpcrun.train.setup.data import Validation, build_batches, build_validation
from hpcrun.train.setup.model import build_model
from hpcrun.train.setup.observers import (
    announce,
    build_metrics,
    build_profile,
    build_saver,
    open_compile_cache,
    watch_gradients,
)
from hpcrun.train.setup.stop_reason import stop_reason
from hpcrun.train.setup.task import open_task
from hpcrun.train.step.micro_batches import MicroBatchStep
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import Task


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
        Exception: any error of the task or of a peer's end.
    """
    choose_kernels(config.train.deterministic)
    flight_recorder.turn_on()
    distributed = process_group.join_run(
        distributed, run, attempt, timeout=config.train.timeout, interface=config.job.interface
    )
    if distributed.backend == "nccl" and distributed.rank == 0:
        announce_order(config.train.deterministic)
    ranks = process_group.control_ranks(distributed)
    with watching(run, attempt, config, distributed, position) as at:
        context = Context(run, attempt, config, distributed, ranks, at)
        if distributed.backend == "nccl":
            with at("connecting the GPUs"):
                process_group.connect(process_group.select_device(distributed))
        code = _train(context, flag, position)
        # Leave together: srun ends all tasks as soon as one exits with a code other than 0.
        with at("leaving"):
            if ranks.world_size > 1:
                dist.barrier(group=ranks.group)
        process_group.cleanup_distributed()
    return code


def _train(context: Context, flag: StopFlag, position: Position) -> int:
    """Build the parts of the training, run the loop, and report the end."""
    run, config, ranks, at = context.run, context.config, context.ranks, context.at
    opened = open_task(context)
    # Make the engine while all ranks are at the same point: its group has a shorter timeout than the
    # watchdog.
    engine = build_engine(run, context.attempt, config, context.distributed, ranks)
    device = process_group.select_device(context.distributed)
    measured = measure(config, opened.task, opened.model, device)
    resumed = build_model(context, opened, engine, device)
    trainer = resumed.trainer
    position.start = resumed.start
    early = resumed.early_stopping(config)
    steps = range(resumed.start, early.end(config.train.steps))
    batches = build_batches(context, opened, resumed, steps)
    take = context.together(
        lambda: MicroBatchStep(trainer, opened.task, batches.batching, measured.loss)
    )
    compiled = open_compile_cache(context, device)
    # Only here, since the data may refuse to resume.
    announce(context, resumed, batches.batching)
    metrics = build_metrics(context, opened, resumed, batches.batching, measured)
    saver = build_saver(context, resumed, engine, batches, early, metrics)
    validation = build_validation(context, opened, trainer)
    loop = Loop(
        config=config,
        steps=steps,
        batches=measured.watch.batches(batches),
        take=take,
        agreement=StopAgreement(ranks.group, config.train.stop_check_every),
        reason_to_stop=stop_reason(config, flag, main=trainer.is_main_process),
        validate=validation.loss,
        early=early,
        metrics=metrics,
        saver=saver,
        nonfinite=watch_gradients(context, opened, resumed, batches.batching),
        profile=build_profile(context, resumed, measured, position),
        position=position,
        compiled=compiled,
    )
    with (
        context.explain_memory(batches.batching, trainer.parallel, device, trainer.module),
        at(TRAINING),
        compilation.shown_in(position, wanted=config.train.compile),
    ):
        measured.watch.start()
        try:
            stop = loop.run()
        finally:
            metrics.flush()
    with at("ending"):
        loop.agreement.finish()
        loop.batches.close()
    return _end(context, loop, opened.task, trainer, engine, validation, stop)


def _end(
    context: Context,
    loop: Loop,
    task: Task,
    trainer: DistributedAMPTrainer,
    engine: CheckpointEngine,
    validation: Validation,
    stop: StopReason,
) -> int:
    """Validate the last weights if necessary, write the report, and send the metrics. Collective."""
    run, attempt, config, at = context.run, context.attempt, context.config, context.at
    early, saver = loop.early, loop.saver
    validated = early.seen == early.end(config.train.steps)
    with at(VALIDATING):
        loss = early.loss if stop or validated else validation.loss()
        validation.close()
    if stop:
        code = stopped(run, attempt, stop, saver, trainer)
    else:

        def best(last: Weights) -> Weights:
            if not config.checkpoint.keep_best:
                return last
            store = CheckpointStore(run.checkpoints, attempt.owner)
            with at("restoring the best weights"):
                return put_best_back(trainer, engine, store, early, last)

        with at("making the report"):
            code = finished(
                run, attempt, config, task, trainer, saver, early, loss, best, context.ranks
            )
    # Before any rank leaves: srun ends rank 0 soon after another rank has left with an exit code, and an
    # upload takes longer.
    with at("sending the metrics"):
        loop.metrics.close()
    return code
