"""End of a training, finished or stopped: log lines, result.json and the exit code."""

import json
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.config import Config
from hpcrun.job import exitcodes
from hpcrun.job.history import histories
from hpcrun.job.policy import OWN_DOING
from hpcrun.printing import say
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.signals import StopReason
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, Cause, note, read_events
from hpcrun.run.io.files import write_hashed
from hpcrun.run.owner import require_ownership
from hpcrun.run.progress_lines import result_lines
from hpcrun.train.evaluation.best import Weights
from hpcrun.train.evaluation.early_stopping import EarlyStopping
from hpcrun.train.saving import Saver
from hpcrun.train.step.trainer import AMPTrainer
from hpcrun.train.task import Task

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
