"""Put one rank's training together from the config, run it, and report its end."""

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.config import Config
from hpcrun.job import policy as exitcodes
from hpcrun.job.history import histories
from hpcrun.job.policy import OWN_DOING
from hpcrun.printing import say
from hpcrun.ranks.collective import Ranks, StopAgreement
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.signals import StopFlag, StopReason
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Cause, note, read_events, result_lines
from hpcrun.run.files import write_hashed
from hpcrun.run.record import require_ownership
from hpcrun.train.determinism import announce_order, choose_kernels, explain_refusals
from hpcrun.train.early_stopping import EarlyStopping, Weights, put_best_back
from hpcrun.train.health import hang_diagnosis as flight_recorder
from hpcrun.train.health.nonfinite import NonFiniteWatch
from hpcrun.train.health.watchdog import watching
from hpcrun.train.metrics.log import MetricsLog, measure
from hpcrun.train.metrics.timing import Profile, TimedSteps
from hpcrun.train.model import compile_cache as compilation
from hpcrun.train.model.compile_cache import CompileCache
from hpcrun.train.parallel import process_group
from hpcrun.train.position import TRAINING, VALIDATING, Position
from hpcrun.train.saving import Saver, build_engine
from hpcrun.train.setup.data import Validation, build_batches, build_validation
from hpcrun.train.setup.model import build_model
from hpcrun.train.setup.observers import (
    announce,
    build_metrics,
    build_profile,
    build_saver,
    open_compile_cache,
    stop_reason,
    watch_gradients,
)
from hpcrun.train.setup.task import Context, open_task
from hpcrun.train.step.micro_batches import MicroBatchStep
from hpcrun.train.step.trainer import AMPTrainer, DistributedAMPTrainer, StepResult
from hpcrun.train.task import Task


@dataclass(frozen=True)
class Loop:
    """Parts of the loop; session.py makes them."""

    config: Config
    steps: range
    batches: TimedSteps
    take: Callable[[int, list[Any]], StepResult]
    agreement: StopAgreement
    reason_to_stop: Callable[[], StopReason]
    validate: Callable[[], float | None]
    early: EarlyStopping
    metrics: MetricsLog
    saver: Saver
    nonfinite: NonFiniteWatch
    profile: Profile
    position: Position
    compiled: CompileCache

    def run(self) -> StopReason:
        """Train to the end, or until all ranks agree to stop; return the reason (NONE: the end).

        On return the last step is committed, unless ``saver.failed`` says why not.
        """
        train = self.config.train
        for step in self.steps:
            stop = self.agreement.exchange(step, self.reason_to_stop())
            if stop:
                self.nonfinite.finish()
                with self._saving():
                    self.saver.finish(step)
                return stop
            self.position.step = step
            self.profile.before(step)
            # Only after the stop decision: reading a sample may draw from the generators that are saved.
            micro_batches = next(self.batches)
            result = self.take(step, micro_batches)
            done = step + 1
            self.compiled.after_step()
            self.metrics.step(done, result)
            self.nonfinite.check(result)
            best = self._validate(done)
            if self.early.due:
                self.metrics.log_pending(done)
            self.saver.poll()
            if self.saver.due(done) or (best and self.config.checkpoint.keep_best):
                with self._saving():
                    self.saver.start(done)
            if self.early.due:
                break
        self.profile.close(self.early.end(train.steps))
        self.nonfinite.finish()
        with self._saving():
            self.saver.finish(self.early.end(train.steps))
        return StopReason.NONE

    @contextlib.contextmanager
    def _saving(self) -> Iterator[None]:
        """Flush the metrics before a save, so that all lines up to its step are written."""
        with self.position.at("saving"), self.metrics.paused():
            self.metrics.flush()
            self.compiled.save()
            yield

    def _validate(self, done: int) -> bool:
        """Validate if it is time; return True if the loss is the lowest so far."""
        train = self.config.train
        every = train.validate_every
        if done != train.steps and not (every and done % every == 0):
            return False
        with self.position.at(VALIDATING), self.metrics.paused():
            loss = self.validate()
            if loss is not None:
                self.metrics.write({"step": done, "validation_loss": loss})
        return self.early.record(done, loss)


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


_REASONS = {
    StopReason.TERMINATE: "by SIGTERM (a cancellation, or a preemption)",
    StopReason.WARNING: "by SIGUSR2 (the warning before a time limit or a preemption)",
    StopReason.DEADLINE: "the time limit is near",
}


def stopped(
    run: RunDirectory, attempt: Attempt, stop: StopReason, saver: Saver, trainer: AMPTrainer
) -> int:
    """Log that all ranks stopped before the end, and return the exit code."""
    if trainer.is_main_process:
        print(f"hpcrun: stopped: {_REASONS[stop]}; saved up to step {saver.saved}", flush=True)
        committed = saver.failed is None
        note(
            run,
            "stopped",
            attempt,
            cause=stop.name.lower(),
            step=saver.saved,
            committed=committed,
        )
    return exitcodes.UNFINISHED if saver.failed is None else exitcodes.SAVE_FAILED


def finished(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    task: Task,
    trainer: AMPTrainer,
    saver: Saver,
    early: EarlyStopping,
    validation_loss: float | None,
    put_best_back: Callable[[Weights], Weights],
    ranks: Ranks,
) -> int:
    """Write result.json on rank 0, and return the exit code. Collective.

    ``put_best_back``: loads the weights for the report into the trainer; collective.

    If the report fails, the training is still finished: result.json then gives the reason.

    Raises:
        OwnedByAnotherAttempt: a newer attempt owns the run now and will write the file.
    """
    if saver.failed is not None:
        return exitcodes.SAVE_FAILED
    steps = early.end(config.train.steps)
    shown = last = Weights(steps, validation_loss)
    report: dict[str, Any] = {}
    error = ranks.from_rank_0(lambda: _given_up(run, attempt, config.restarts.no_progress))
    if trainer.is_main_process:
        note(run, "trained", attempt, step=steps)
        if error is not None:
            print(f"hpcrun: report: {error}", file=sys.stderr, flush=True)
    if error is None:
        try:
            if type(task).report is not Task.report:
                shown = put_best_back(last)
        except CheckpointError as problem:
            error = f"none: the weights for the report are no longer readable: {problem}"
        else:
            with trainer.averaged():
                report, error = _report(task, trainer, shown.validation_loss)
    if trainer.is_main_process:
        # The run may have a new owner since the last commit.
        require_ownership(run, attempt)
        write_hashed(
            run.result,
            {
                "state": "finished",
                "steps": steps,
                "validation_loss": validation_loss,
                **_best(early),
                "report": report,
                "report_step": shown.step,
                **({"report_error": error} if error else {}),
                "time": round(time.time(), 3),
            },
        )
        note(run, "finished", attempt, step=steps, **({"early": True} if early.due else {}))
        if early.due:
            print(f"hpcrun: stopped early {early.reason()}", flush=True)
        if shown != last:
            print(
                f"hpcrun: the report is for step {shown.step}, the best; {steps} is the last",
                flush=True,
            )
        say(*result_lines(run))
    return exitcodes.DONE


# A report that crashes the process may look like a dead node. The run is finished without the report.
_REPORT_ENDED = OWN_DOING | {Cause.NODE_FAILURE}


def _given_up(run: RunDirectory, attempt: Attempt, limit: int | None) -> str | None:
    """Return the reason to make no report: too many attempts of the job have ended during the report."""
    ended = sum(
        record.trained and record.cause in _REPORT_ENDED
        for record in histories(read_events(run))
        if record.attempt != attempt
    )
    if limit is None or ended < limit:
        return None
    attempts = "1 attempt" if ended == 1 else f"{ended} attempts"
    return (
        f"none: {attempts} ended while making it (restarts.no_progress); the training is finished "
        f"nevertheless; to try again, remove {run.result.name} and run `hpcrun resume`"
    )


def _best(early: EarlyStopping) -> dict[str, Any]:
    """Return the entries of result.json about validation."""
    if early.best is None:
        return {}
    best = {"step": early.best_step, "validation_loss": early.best}
    return {"best": best, **({"stopped_early": early.reason()} if early.due else {})}


def _report(
    task: Task, trainer: AMPTrainer, validation_loss: float | None
) -> tuple[dict[str, Any], str | None]:
    try:
        module = trainer.whole_module()  # Collective.
        if module is None or not trainer.is_main_process:
            return {}, None
        report = dict(task.report(module, validation_loss))
        json.dumps(report)
    except Exception as error:
        traceback.print_exc()
        message = " ".join(str(error).split())
        line = f"{type(task).__name__}.report() raised {type(error).__name__}: {message}"
        print(f"hpcrun: {line}; the training is finished nevertheless", file=sys.stderr, flush=True)
        return {}, line
    return report, None
