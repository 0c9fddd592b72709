"""Exact resume for the Trainer of transformers: ``Trainer(callbacks=[ExactResume()])``.

A callback does not see its Trainer. So the import of this module wraps two functions of transformers:
``Trainer.train``, which looks for the callback, and ``skip_first_batches``, because the loader of a resumed
epoch gives only the rest of the epoch. Both change nothing for a Trainer without the callback.
"""

import functools
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import transformers.trainer
from transformers import Trainer, TrainerCallback

from hpcrun.checkpoint.state.bucket_order import BucketOrder
from hpcrun.checkpoint.state.hook_state import HookStates
from hpcrun.errors import UserError
from hpcrun.integrations.accelerate import ExactBase, exact_shard
from hpcrun.integrations.folder_session import FolderSession
from hpcrun.integrations.wandb import continue_wandb_run
from hpcrun.ranks.signals import STOP, StopReason
from hpcrun.train.data.exact_loader import next_pass
from hpcrun.train.own_loop.session import (
    ENDED,
    default_folder,
    refuse_in_a_line,
    require_first,
)

_FACTS = ("per_device_train_batch_size", "gradient_accumulation_steps", "seed", "data_seed")


class ExactResume(TrainerCallback):  # type: ignore[misc]
    """Callback that makes ``trainer.train()`` resume with the bits of an undisturbed training.

    ``train()`` resumes by itself from the newest valid checkpoint; a finished training does not train again.
    At a stop signal all ranks save after the same step and end with exit code 75. The Trainer writes its
    usual folders ``checkpoint-STEP``, as ``save_strategy`` says, and hpcrun adds the position in the data and
    a manifest with hashes. A save at the last step of an epoch comes after the events of the epoch's end, so
    that a resume does not skip them.

    Args:
        folder: the folder of the checkpoints; None: the run's folder in a job of hpcrun, or ``output_dir``.
    """

    def __init__(self, folder: Path | str | None = None) -> None:
        self._folder = folder
        self._trainer: Any = None
        STOP.install()
        refuse_in_a_line()
        continue_wandb_run()

    def run(self, trainer: Any, train: Callable[..., Any], given: str | bool | None) -> Any:
        """Call ``train(resume_from_checkpoint=…)`` of ``trainer`` so that it resumes exactly. Collective.

        Args:
            given: the ``resume_from_checkpoint`` of the program.

        Raises:
            UserError: an argument makes an exact resume impossible; the text has the remedy.
            CheckpointError: as :class:`FolderSession`.
            SystemExit: with the code 75, after a stop.
        """
        options = trainer.args
        _require_exact(options)
        root = self._root(options)
        require_first(root)
        limit = options.save_total_limit
        self._session = FolderSession(
            root,
            keep=max(2, limit) if limit else None,
            facts={name: getattr(options, name) for name in _FACTS},
        )
        self._trainer = trainer
        self._saved: int | None = None
        self._own: dict[str, Any] = {}
        self._stop = StopReason.NONE
        # The session removes old checkpoints, after the commit of a new one.
        changes: dict[str, Any] = {"save_total_limit": None}
        start = None
        found = self._session.newest()
        if found is not None:
            self._saved, self._own = found
            start = str(self._session.folders.path(self._saved))
            # An evaluation at the start would count again, for example for early stopping.
            changes |= {"restore_callback_states_from_checkpoint": True, "eval_on_start": False}
        elif isinstance(given, str) and Path(given).absolute().parent != root:
            raise UserError(
                f"resume_from_checkpoint={given}: ExactResume resumes from {root} only; remove the argument, "
                "and load weights of another training with from_pretrained()"
            )
        with _changed(options, changes), _changed(trainer, self._wrapped(trainer)):
            result = train(resume_from_checkpoint=start)
        self._session.finish()
        ENDED[root] = self
        return result

    # Events of the Trainer

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Move behind callbacks that decide about a stop, and restore what the Trainer does not save."""
        handler = self._trainer.callback_handler
        handler.callbacks.remove(self)
        handler.callbacks.append(self)
        self._epoch = self._own.get("epoch", 0) - 1
        trainer = self._trainer
        model = trainer.model_wrapped
        self._buckets = BucketOrder(model)
        self._hooks = HookStates([model], buckets=BucketOrder(model, for_hooks=True))
        self._hooks.capture()  # refuses a hook with a state that cannot be saved, before training
        if self._own:
            self._buckets.load_state_dict(self._own["buckets"])
            if note := self._hooks.restore(self._own.get("hooks")):
                self._session.say(note)
            trainer._tr_loss = self._own["loss"].to(args.device)
            # The Trainer reports the mean loss of the steps since its own start.
            trainer._total_loss_scalar = -float(trainer._tr_loss)
            trainer._globalstep_last_logged = self._own["logged"]

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begin to count the batches of the epoch."""
        self._epoch += 1
        self._batches = self._own.get("batches", 0) if self._epoch == self._own.get("epoch") else 0
        self._at_end = self._delayed = False

    def on_substep_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count a batch of gradient accumulation."""
        self._batches += 1

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the batch, and agree with the other ranks on a stop."""
        self._batches += 1
        self._stop = self._stop or self._session.reason(state.global_step)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Allow saves again that wait for the end of the epoch."""
        self._at_end = True

    # Methods of the Trainer

    def _wrapped(self, trainer: Any) -> dict[str, Callable[..., Any]]:
        """Return the Trainer's methods that this object wraps; each gets the Trainer's own method first."""
        wrappers: dict[str, Callable[..., Any]] = {
            "get_train_dataloader": self._train_loader,
            "get_eval_dataloader": self._evaluation_loader,
            "_get_output_dir": self._output_folder,
            "_init_training_state": self._position,
            "_maybe_log_save_evaluate": self._after_step,
            "_save_checkpoint": self._save,
        }
        for name in wrappers:
            if not hasattr(trainer, name):
                raise UserError(
                    f"transformers {transformers.__version__}: its Trainer has no {name}; install "
                    "transformers 5.23, with which ExactResume is tested"
                )
        return {
            name: functools.partial(way, getattr(trainer, name)) for name, way in wrappers.items()
        }

    def _train_loader(self, make: Callable[[], Any]) -> Any:
        loader = make()
        self._exact = exact_shard(loader, "train")
        if self._own:
            self._exact.load_state_dict(self._own["loader"])
        return loader

    def _evaluation_loader(self, make: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        loader = make(*arguments, **named)
        # The seed of workers must not come from the training's generator: persistent workers draw it once.
        base = getattr(loader, "base_dataloader", loader)  # a program may return its own loader
        base.generator = torch.Generator().manual_seed(self._trainer.state.global_step)
        return loader

    def _output_folder(self, _make: Callable[..., str], trial: Any = None) -> str:
        return str(self._session.folders.root)

    def _position(self, begin: Callable[..., tuple[int, int]], *arguments: Any) -> tuple[int, int]:
        """Return the number of finished epochs, and of finished batches in the next epoch."""
        begun = begin(*arguments)
        if not self._own:
            return begun
        state = self._trainer.state
        if self._own["stopped"] or state.global_step >= state.max_steps:
            return state.num_train_epochs, 0
        return self._own["epoch"], self._own["batches"]

    def _after_step(self, act: Callable[..., None], *arguments: Any, **named: Any) -> None:
        """Log, evaluate and save, as the Trainer decides; save also at a stop and at the end of training."""
        act(*arguments, **named)
        trainer = self._trainer
        if self._waits():
            return
        final = self._at_end and (self._delayed or trainer.control.should_training_stop)
        if (self._stop or final) and self._saved != trainer.state.global_step:
            trainer._save_checkpoint(trainer.model_wrapped, None)
            trainer.control = trainer.callback_handler.on_save(
                trainer.args, trainer.state, trainer.control
            )
        if self._stop:
            self._session.leave(trainer.state.global_step, self._stop)

    def _save(self, write: Callable[..., None], model: Any, trial: Any) -> None:
        """Write and commit a checkpoint, now or at the end of the epoch."""
        if self._waits():
            self._delayed = True
            return
        trainer = self._trainer
        state, control = trainer.state, trainer.control
        step = state.global_step
        for name, states in state.stateful_callbacks.items():
            if isinstance(states, list):
                # The Trainer appends to the states of several callbacks of a class, and reads the first.
                state.stateful_callbacks[name] = []
        self._session.folders.prepare(step)
        write(model, trial)
        # The Trainer reads the next batch before a step.
        place = self._exact.state_dict(None if self._at_end else self._batches)
        own = {
            "epoch": self._epoch + self._at_end,
            "batches": 0 if self._at_end else self._batches,
            "loader": next_pass(place) if self._at_end else place,
            "buckets": self._buckets.state_dict(),
            "hooks": self._hooks.capture(),
            "loss": trainer._tr_loss.detach().cpu(),
            "logged": trainer._globalstep_last_logged,
            "stopped": control.should_training_stop and step < state.max_steps,
        }
        best = state.best_model_checkpoint
        self._session.commit(step, own, Path(best) if best else None)
        self._saved = step

    def _waits(self) -> bool:
        """Return True after the last step of an epoch, until the events of its end."""
        state, control = self._trainer.state, self._trainer.control
        leaves = control.should_training_stop or control.should_epoch_stop
        return not self._at_end and (leaves or state.epoch >= self._epoch + 1)

    def _root(self, options: Any) -> Path:
        outside = self._folder is None and "HPCRUN_RUN" not in os.environ
        return (Path(options.output_dir) if outside else default_folder(self._folder)).absolute()


def _require_exact(options: Any) -> None:
    """Raise UserError for arguments of a Trainer that make an exact resume impossible."""
    reasons = {
        "enable_jit_checkpoint": "ExactResume saves at a signal itself",
        "save_only_model": "a checkpoint without the optimizer cannot be resumed",
        "ignore_data_skip": "a resumed epoch would begin at its first batch",
        "auto_find_batch_size": "the batch size would depend on free memory",
    }
    for name, reason in reasons.items():
        if getattr(options, name):
            raise UserError(f"TrainingArguments({name}=True): {reason}; remove it")
    if options.n_gpu > 1:
        raise UserError(
            f"one process uses {options.n_gpu} GPUs, and the Trainer saves the random state of one; start a "
            "process for each GPU: hpcrun submit --gpus …, or torchrun"
        )


@contextmanager
def _changed(target: Any, values: dict[str, Any]) -> Iterator[None]:
    """Set attributes of ``target`` in the block."""
    before = {name: vars(target)[name] for name in values if name in vars(target)}
    vars(target).update(values)
    try:
        yield
    finally:
        for name in values:
            del vars(target)[name]
        vars(target).update(before)


def _wrap_train(train: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(train)
    def wrapper(
        self: Any,
        resume_from_checkpoint: Any = None,
        trial: Any = None,
        *arguments: Any,
        **named: Any,
    ) -> Any:
        callbacks = self.callback_handler.callbacks
        exact = next((one for one in callbacks if isinstance(one, ExactResume)), None)
        if exact is None:
            return train(self, resume_from_checkpoint, trial, *arguments, **named)
        if trial is not None:
            raise UserError(
                "hyperparameter_search() with ExactResume: the trials would share checkpoints; submit "
                "a sweep of hpcrun, with one training for each run"
            )

        def begin(resume_from_checkpoint: str | None) -> Any:
            return train(self, resume_from_checkpoint, None, *arguments, **named)

        return exact.run(self, begin, resume_from_checkpoint)

    return wrapper


def _wrap_skip(skip: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(skip)
    def wrapper(dataloader: Any, num_batches: int = 0) -> Any:
        base = getattr(dataloader, "base_dataloader", None)
        return dataloader if type(base) is ExactBase else skip(dataloader, num_batches)

    return wrapper


Trainer.train = _wrap_train(Trainer.train)
transformers.trainer.skip_first_batches = _wrap_skip(transformers.trainer.skip_first_batches)
