"""Make the parts around a training: announcement, metrics, checkpoints, compiled code, gradients, profile."""

import os
from collections.abc import Callable

import torch

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.config import Config, recorded, ways
from hpcrun.ranks.deadline import DeadlineWatch, JobEnd, end_time, query_end_time
from hpcrun.ranks.launchers import in_local_cluster, job_id
from hpcrun.ranks.signals import StopFlag, StopReason
from hpcrun.run.events import note
from hpcrun.train.data.batches import Steps
from hpcrun.train.data.batching import Batching
from hpcrun.train.early_stopping import EarlyStopping
from hpcrun.train.health.nonfinite import NonFiniteWatch, samples_of
from hpcrun.train.metrics.log import MetricsLog, StepMeasurements
from hpcrun.train.metrics.sinks import build_sinks
from hpcrun.train.metrics.timing import Profile
from hpcrun.train.model.compile_cache import CompileCache, open_cache
from hpcrun.train.optimizer import JointOptimizer, learning_rate_lines
from hpcrun.train.position import Position
from hpcrun.train.saving import Saver, build_interval
from hpcrun.train.setup.model import Resumed
from hpcrun.train.setup.task import Context, OpenedTask
from hpcrun.train.step.precision import faster


def announce(context: Context, resumed: Resumed, batching: Batching) -> None:
    """Print how the training starts, and write the event ``started``, on rank 0."""
    trainer, restored, start = resumed.trainer, resumed.checkpoint, resumed.start
    if not trainer.is_main_process:
        return
    lines = list(restored.notes) if restored else []
    if restored is not None and restored.own is None:
        lines.append(
            "the random states are derived from seed, rank and step; the order of samples is unchanged"
        )
    if resumed.ways:
        lines.append(
            f"different from when step {start} was saved: {'; '.join(resumed.ways)}; the samples and the "
            "sums over them stay the same, but not their last bits, nor random draws such as dropout's"
        )
    told = any(line.startswith("CPU threads") for line in lines)
    drift = [line for line in resumed.drift if not (told and line.startswith("threads:"))]
    if drift:
        lines.append(
            f"the environment has changed since step {start} was saved: {'; '.join(drift)}; the last bits "
            "may differ from those of a training without the interruption"
        )
    if restored is None and (hint := faster(context.config.amp, trainer.device)) is not None:
        lines.append(hint)
    ranks = trainer.distributed.world_size
    where = f"resumed from step {start}" if restored else "starting at step 0"
    lines.append(f"{context.run.name}: {where}, {ranks} {'rank' if ranks == 1 else 'ranks'}")
    for line in lines:
        print(f"hpcrun: {line}", flush=True)
    note(
        context.run,
        "started",
        context.attempt,
        step=start,
        ranks=ranks,
        parallel=trainer.parallel,
    )
    rates = learning_rate_lines(context.config, trainer.optimizer)
    joint = trainer.optimizer
    parts = joint.lines() if isinstance(joint, JointOptimizer) else ()
    for line in (*batching.lines(context.config.train.steps), *rates, *parts):
        print(f"hpcrun: {line}", flush=True)


def build_metrics(
    context: Context,
    opened: OpenedTask,
    resumed: Resumed,
    batching: Batching,
    measured: StepMeasurements,
) -> MetricsLog:
    """Make the log of metrics with its sinks, and restore its unlogged steps. Collective.

    Raises:
        UserError: a package for a sink is missing.
    """
    trainer = resumed.trainer
    sinks = context.together(
        lambda: (
            build_sinks(context.run, context.config, resumed.start)
            if trainer.is_main_process
            else None
        )
    )
    metrics = MetricsLog(
        context.config,
        opened.task,
        trainer,
        batching,
        measured,
        sinks,
        ranks=context.ranks,
        restart=context.attempt.restart,
    )
    metrics.restore(resumed.extra("metrics", []))
    return metrics


def build_saver(
    context: Context,
    resumed: Resumed,
    engine: CheckpointEngine,
    batches: Steps,
    early: EarlyStopping,
    metrics: MetricsLog,
) -> Saver:
    """Make the saver with the configured interval."""
    config = context.config
    saver = Saver(
        context.run,
        context.attempt,
        resumed.trainer,
        engine,
        interval=build_interval(context.run, config, context.ranks, lambda: saver.costs),
        batches=batches,
        early=early,
        metrics=metrics,
        meta={
            "config": recorded(config),
            "environment": resumed.environment,
            "ways": ways(config),
        },
        saved=resumed.checkpoint.step if resumed.checkpoint else None,
    )
    return saver


def watch_gradients(
    context: Context, opened: OpenedTask, resumed: Resumed, batching: Batching
) -> NonFiniteWatch:
    """Make the watch for non-finite gradients."""
    return NonFiniteWatch(
        context.run,
        context.attempt,
        context.config,
        resumed.trainer,
        start=resumed.start,
        ranks=context.ranks,
        samples=samples_of(opened.dataset, batching, context.config.seed),
    )


def open_compile_cache(context: Context, device: torch.device) -> CompileCache:
    """Load the code that earlier attempts have compiled, and keep that of this attempt. Collective."""
    train, at = context.config.train, context.distributed
    kept = train.compile and train.compile_cache
    path = context.run.compile_cache if kept else None
    cache = open_cache(path, device, node_rank=at.node_rank, local_rank=at.local_rank)
    if kept:
        with context.at("loading compiled code"):
            # Collective, since the ranks of a node share the folder that some of them fill.
            line = context.together(cache.load)
        if at.rank == 0 and line is not None:
            print(f"hpcrun: {line}", flush=True)
    return cache


def build_profile(
    context: Context, resumed: Resumed, measured: StepMeasurements, position: Position
) -> Profile:
    """Make the profiler of the configured window of steps."""
    return Profile(
        context.run,
        context.config.train.profile,
        resumed.start,
        rank=context.distributed.rank,
        device=resumed.trainer.device,
        watch=measured.watch,
        position=position,
    )


def stop_reason(config: Config, flag: StopFlag, *, main: bool) -> Callable[[], StopReason]:
    """Return a function for the reason to stop: a signal, or (on rank 0, ``main``) the time limit."""
    deadline = _watch_deadline(config) if main else None

    def reason() -> StopReason:
        late = deadline is not None and deadline.due()
        return max(flag.reason, StopReason.DEADLINE if late else StopReason.NONE)

    return reason


def _watch_deadline(config: Config) -> DeadlineWatch:
    job = job_id(os.environ)

    def ask() -> float | None:
        # Ask Slurm first: the environment variable does not follow an extended limit.
        found = None if job is None or in_local_cluster(os.environ) else query_end_time(job)
        return found or end_time(os.environ)

    return DeadlineWatch(JobEnd(ask, lead=float(config.job.signal_lead)))
