"""End of a training: the best weights, the report and result.json, or the note of a stop."""

import json
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hpcrun import exit_codes
from hpcrun.checkpoint.saver import Saver
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.printing import say
from hpcrun.ranks.signals import StopReason
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import write_hashed
from hpcrun.run.journal.events import Finished, Stopped, Trained
from hpcrun.run.journal.journal import Journal
from hpcrun.run.progress_lines import result_lines
from hpcrun.run.record import require_ownership
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.store import CheckpointStore
from hpcrun.train.setup import Context
from hpcrun.train.step.trainer import AMPTrainer
from hpcrun.train.task import Task
from hpcrun.train.validation import EarlyStopping

_REASONS = {
    StopReason.SLOW_NODE: "another node takes the place of a slow node (restarts.replace_slow)",
    StopReason.TERMINATE: "by SIGTERM (a cancellation, or a preemption)",
    StopReason.WARNING: "by SIGUSR2 (the warning before a time limit or a preemption)",
    StopReason.DEADLINE: "the time limit is near",
}


def stopped(
    run: RunDirectory,
    attempt: Attempt,
    stop: StopReason,
    saver: Saver,
    trainer: AMPTrainer,
    leaving: Sequence[str] = (),
) -> int:
    """Log that all ranks stopped before the end, and return the exit code.

    Args:
        leaving: on rank 0, the slow nodes that another node is to replace.
    """
    if trainer.is_main_process:
        print(f"hpcrun: stopped: {_REASONS[stop]}; saved up to step {saver.saved}", flush=True)
        committed = saver.failed is None
        slow: dict[str, Any] = {"hosts": [*leaving]} if stop is StopReason.SLOW_NODE else {}
        stopped = Stopped(
            attempt=attempt,
            cause=stop.name.lower().replace("_", "-"),
            step=saver.saved,
            committed=committed,
            **slow,
        )
        Journal(run).note(stopped)
    return exit_codes.UNFINISHED if saver.failed is None else exit_codes.SAVE_FAILED


def finished(
    context: Context,
    task: Task,
    trainer: AMPTrainer,
    saver: Saver,
    engine: CheckpointEngine,
    early: EarlyStopping,
    validation_loss: float | None,
) -> int:
    """Write result.json on rank 0, and return the exit code. Collective.

    If the report fails, the training is still finished: result.json then gives the reason.

    Raises:
        OwnedByAnotherAttempt: a newer attempt owns the run now and will write the file.
    """
    run, attempt, config = context.run, context.attempt, context.config
    if saver.failed is not None:
        return exit_codes.SAVE_FAILED
    steps = early.end(config.train.steps)
    shown = last = Weights(steps, validation_loss)
    report: dict[str, Any] = {}
    error = None
    if trainer.is_main_process:
        Journal(run).note(Trained(attempt=attempt, step=steps))
    try:
        if type(task).report is not Task.report and config.checkpoint.keep_best:
            with context.at("restoring the best weights"):
                shown = put_best_back(trainer, engine, early, last)
    except CheckpointError as problem:
        error = f"none: the best weights are not readable: {problem}"
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
        known: dict[str, Any] = {"early": True} if early.due else {}
        Journal(run).note(Finished(attempt=attempt, step=steps, **known))
        if early.due:
            print(f"hpcrun: stopped early {early.reason()}", flush=True)
        if shown != last:
            print(
                f"hpcrun: the report is for step {shown.step}, the best; {steps} is the last",
                flush=True,
            )
        say(*result_lines(run))
    return exit_codes.DONE


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


@dataclass(frozen=True)
class Weights:
    """The weights after ``step`` steps, and their validation loss; None without a validation."""

    step: int
    validation_loss: float | None


def put_best_back(
    trainer: AMPTrainer,
    engine: CheckpointEngine,
    early: EarlyStopping,
    last: Weights,
) -> Weights:
    """Load the best checkpoint, and return which weights the trainer has then. Collective.

    The trainer enters with ``last``, which is committed, so nothing is lost; save nothing after this call.
    The trainer keeps ``last`` if no checkpoint of the best loss is there, or if ``last`` has this loss.

    Raises:
        CheckpointError: the best checkpoint is not readable.
    """
    ranks, store = engine.ranks, engine.store
    kept = ranks.from_rank_0(lambda: _kept(store, early))
    if not kept or last.step in kept:
        return last
    best = max(kept)
    others = ranks.from_rank_0(lambda: set(store.steps()) - {best})
    if trainer.load_checkpoint(engine, skip=others) is None:
        raise CheckpointError(f"step {best} is gone")
    return Weights(best, early.best)


def _kept(store: CheckpointStore, early: EarlyStopping) -> list[int]:
    """Return the steps of all checkpoints with the lowest validation loss; ties are equally good."""
    return [
        step
        for step, manifest in store.valid().items()
        if early.best is not None and manifest.meta.get("validation_loss") == early.best
    ]
