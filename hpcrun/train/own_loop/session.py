"""Commits, the agreed stop and the exit code of a training loop that is not hpcrun's."""

import os
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

import torch.distributed as dist

from hpcrun.checkpoint.checkpointer import Checkpointer
from hpcrun.errors import UserError
from hpcrun.exit_codes import UNFINISHED
from hpcrun.printing import say_aside
from hpcrun.ranks.collective import Ranks, StopAgreement
from hpcrun.ranks.signals import STOP, StopReason, end_helpers
from hpcrun.ranks.tree_group import new_control_group
from hpcrun.run.directory import RunDirectory
from hpcrun.run.reports import report
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.retention import Retention

_CODE = str(Path(__file__).parents[2])
ENDED: dict[Path, object] = {}
"""The trainings that have ended in this process, by the folders of their checkpoints."""


class Stop:
    """The agreed stop of a training on one process or all ranks of torch.distributed.

    The constructor is collective, and handles the stop signals, so call it in the main thread.

    Attributes:
        ranks: all ranks, with a control group.

    Raises:
        UserError: the launcher started several ranks, and torch.distributed is not initialized.
    """

    def __init__(self) -> None:
        rank, size = own_place()
        STOP.install()
        group = new_control_group() if size > 1 else None
        self.ranks = Ranks(rank, size, group, CheckpointError)
        self.agreement = StopAgreement(group)

    def reason(self, steps: int, notes: Sequence[int] = ()) -> StopReason:
        """Report the step, and return the reason to stop that the ranks have agreed on, or NONE.

        Args:
            steps: number of finished steps, the same on all ranks; larger at each call.
            notes: as for :meth:`hpcrun.StopAgreement.exchange`.
        """
        report(steps)
        if taken := STOP.take_over():
            self.say(
                f"the program has set a handler of {', '.join(taken)} after the call of hpcrun; the handler "
                "runs after the save of a stop, on all ranks; set it before the call"
            )
        return self.agreement.exchange(steps, STOP.reason, notes)

    def notes(self, *, wait: bool = False) -> list[int]:
        """Return the largest notes of all ranks of the step before the last; empty in the first step.

        Args:
            wait: return those of the last step; every rank has made it.
        """
        if wait:
            self.agreement.read()
        return self.agreement.notes

    def end(self, steps: int, reason: StopReason) -> NoReturn:
        """End the program after a stop at ``steps`` steps, whose state is saved; raises SystemExit 75."""
        end = "the program's own handler continues" if STOP.replaced else f"exit code {UNFINISHED}"
        self.say(f"stopped after step {steps} ({reason.name.lower()}), saved; {end}")
        end_helpers()
        self.agreement.hand_over()
        raise SystemExit(UNFINISHED)

    def say(self, text: str) -> None:
        """Write a line to standard error, on rank 0."""
        if self.ranks.rank == 0:
            say_aside(f"hpcrun: {text}")


class Session(Stop):
    """Checkpoints and stop of a training with a ``Checkpointer``. Every method is collective.

    Args:
        folder: the folder of the checkpoints; None: as :func:`default_folder`.
        every: as ``minutes``, ``retention`` and the parts of the state (``state``), an argument of
            :class:`hpcrun.Checkpointer`.

    Attributes:
        checkpointer: the ``Checkpointer`` that saves.
        unchecked: number of the next steps that check whether the state can be saved.

    Raises:
        CheckpointError: as :class:`hpcrun.Checkpointer`.
    """

    def __init__(
        self,
        folder: Path | str | None = None,
        *,
        every: int = 100,
        minutes: float | None = None,
        retention: Retention | None = None,
        **state: Any,
    ) -> None:
        super().__init__()
        # The optimizer may have no state before the second call.
        self.unchecked = 2
        self.folder = default_folder(folder)
        self.checkpointer = Checkpointer(
            self.folder, every=every, minutes=minutes, retention=retention, **state
        )

    def restore(self) -> int:
        """Load the newest valid checkpoint, and return the number of finished steps; 0 without one.

        Random generators are restored last. A line on standard error of rank 0 says where training resumes,
        and why a newer checkpoint was not used.

        Raises:
            CheckpointError: as :meth:`hpcrun.Checkpointer.restore`.
        """
        steps = self.checkpointer.restore()
        if steps:
            notes = "".join(f"; {note}" for note in self.checkpointer.notes)
            self.say(f"resumed after step {steps} from {self.folder}{notes}")
        return steps

    def step(self, steps: int, notes: Sequence[int] = ()) -> StopReason:
        """Do as :meth:`reason`; save asynchronously if the interval has passed and no stop is due.

        Returns:
            NONE, or the reason to stop: call :meth:`leave` then.

        Raises:
            CheckpointError: the state cannot be saved, in a step that checks it. Raised on all ranks.
        """
        reason = self.reason(steps, notes)
        if self.unchecked:
            self.unchecked -= 1
            self.checkpointer.require_savable()
        if not reason:
            self.checkpointer.maybe_save(steps)
        return reason

    def save(self, steps: int) -> None:
        """Save asynchronously after ``steps`` steps."""
        self.checkpointer.save(steps)

    def close(self) -> None:
        """Wait for the pending save, and release the folder.

        Raises:
            CheckpointError: the last save failed. Raised on all ranks.
        """
        self.agreement.finish()
        self.checkpointer.close()

    def leave(self, steps: int, reason: StopReason) -> NoReturn:
        """Save after ``steps`` steps, wait for the commit, and end the program with exit code 75.

        Raises:
            SystemExit: always, with the code 75, unless the save fails.
            CheckpointError: the save failed. Raised on all ranks.
        """
        self.save(steps)
        self.close()
        self.end(steps, reason)

    def finish(self, steps: int) -> None:
        """Save after the last step, wait for the commit, and report that the work is done.

        Call it before ``torch.distributed.destroy_process_group()``.

        Raises:
            CheckpointError: the save failed. Raised on all ranks.
        """
        self.save(steps)
        self.close()
        report(steps, done=True)


def refuse_in_a_line() -> None:
    """Make a refusal end the program with one line and exit code 2, except in a job of hpcrun.

    The diagnosis of a job reads tracebacks.
    """
    if "HPCRUN_RUN" not in os.environ:
        sys.excepthook = partial(_show, sys.excepthook)


def _show(
    usual: Callable[..., None],
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
) -> None:
    if not isinstance(error, UserError):
        usual(kind, error, trace)
        return
    place = ""
    for call in traceback.extract_tb(trace):
        if call.filename.startswith(_CODE):
            break
        place = f"{call.filename}:{call.lineno}: "
    say_aside(*(f"{place}{line}" for line in error.lines))
    raise SystemExit(2)


def own_place() -> tuple[int, int]:
    """Return the number of this rank and the number of ranks, as torch.distributed says.

    Raises:
        UserError: the launcher started several ranks, and torch.distributed is not initialized.
    """
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    started = os.environ.get("WORLD_SIZE", "1")
    if started not in ("", "1"):
        raise UserError(
            f"WORLD_SIZE={started}, but torch.distributed is not initialized, so each rank would train "
            "a separate model; call torch.distributed.init_process_group() first (for a Trainer of "
            "transformers on the CPU: TrainingArguments(use_cpu=True))"
        )
    return 0, 1


def require_first(folder: Path, training: object = None) -> None:
    """Raise UserError if another training of this process has ended in ``folder``, and would be resumed."""
    if ENDED.get(folder.absolute(), training) is not training:
        raise UserError(
            f"{folder}: a training of this program has ended there, and a second training would continue "
            "with its weights; give each training its own folder="
        )


def default_folder(folder: Path | str | None) -> Path:
    """Return ``folder``, in a job of hpcrun the run's checkpoints, else ``checkpoints``."""
    if folder is not None:
        return Path(folder)
    run = os.environ.get("HPCRUN_RUN")
    return RunDirectory(Path(run)).checkpoints if run else Path("checkpoints")
