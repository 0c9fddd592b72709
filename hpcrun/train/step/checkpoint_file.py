"""A checkpoint in one torch file (``.pt``, ``.pth``), as plain PyTorch programs write it.

The keys are ``model_state_dict``, ``optimizer_state_dict``, ``scaler_state_dict``, ``scheduler_state_dict``,
``ema``, ``step``, ``metadata``, ``extra``, ``ranks`` and ``generators``. Names of weights have no prefix of a
wrapper. The file loads with ``torch.load(path, map_location="cpu", weights_only=True)``.

A file lacks the random generators of the ranks other than 0, buffers that differ between ranks, and gradients
between the calls of an accumulation. A folder of checkpoints has them.
"""

import pickle
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.state import capture
from hpcrun.checkpoint.state.compatibility import require_same_model
from hpcrun.checkpoint.state.training import TrainingState
from hpcrun.checkpoint.state.tree import bare
from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.drafts import replacing
from hpcrun.errors import UserError, one_line
from hpcrun.train.step.precision import StepResult

SUFFIXES = (".pt", ".pth")

_OF_OTHER_FILES = (".ckpt", ".bin", ".tar", ".pkl", ".pickle", ".safetensors")

_OPTIONAL = ("optimizer", "scheduler")


def is_file_form(where: Any) -> bool:
    """Return True for the path of a checkpoint file; False for a folder, or an engine.

    Raises:
        UserError: the path has the suffix of another file. A folder of this name would be collective, and a
            program that means a file calls it on rank 0 only, which would wait for the other ranks.
    """
    if not isinstance(where, str | Path) or Path(where).is_dir():
        return False
    suffix = Path(where).suffix
    if suffix in _OF_OTHER_FILES:
        stem = str(where).removesuffix(suffix).removesuffix(".pth").removesuffix(".pt")
        raise UserError(
            f"{where}: a checkpoint file ends in .pt or .pth, and a folder of checkpoints has no suffix of a "
            f"file; use {stem}.pth or {stem}"
        )
    return suffix in SUFFIXES


def require_file_form(model: nn.Module, *, sharded: bool) -> None:
    """Raise UserError if a file, which rank 0 writes, cannot hold the state of ``model``."""
    remedy = "save to a folder, a path without .pt or .pth"
    if sharded:
        raise UserError(f"a checkpoint file cannot hold the shards of FSDP's ranks; {remedy}")
    hooks = getattr(model, "_comm_hooks", []) if isinstance(model, DistributedDataParallel) else []
    for _, state in hooks:
        if state is not None and not isinstance(state, dist.ProcessGroup):
            raise UserError(
                "a checkpoint file cannot hold the state that a communication hook has on each rank "
                f"({type(state).__name__}); {remedy}"
            )


def write_file(
    path: Path,
    state: TrainingState,
    step: int,
    *,
    ranks: int,
    include_optimizer: bool,
    metadata: Mapping[str, Any] | None,
    extra: Mapping[str, Any] | None,
) -> SaveOutcome:
    """Write the file atomically; the old file stays until the new file is complete on the disk.

    Args:
        ranks: number of ranks of the training.
        include_optimizer: write the state of the optimizer and of the schedule.
        metadata: plain data and tensors; a StepResult is written as its loss.
        extra: as ``metadata``.

    Raises:
        CheckpointError: ``metadata`` or ``extra`` has something else; the text says where.
    """
    began = time.monotonic()
    content = {
        "model_state_dict": bare(state.model).state_dict(),
        "scaler_state_dict": state.scaler.state_dict(),
        "ema": None if state.averages is None else state.averages.tensors(),
        "step": step,
        "metadata": capture.plain(numbers(dict(metadata or {})), "metadata"),
        "extra": capture.plain(numbers(dict(extra or {})), "extra"),
        "ranks": ranks,
        "generators": capture.capture_rank(),
    }
    for name in _OPTIONAL if include_optimizer else ():
        part = getattr(state, name)
        content[f"{name}_state_dict"] = None if part is None else part.state_dict()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, 0o666) as draft:
            torch.save(content, draft)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        line = f"{path}: {one_line(error)}"
        print(f"hpcrun: the checkpoint of step {step} was not saved: {line}", flush=True)
        return SaveOutcome(False, step, path, line, time.monotonic() - began)
    return SaveOutcome(True, step, path, None, time.monotonic() - began, path.stat().st_size)


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a file, with its tensors on the CPU.

    Raises:
        CheckpointError: the file is missing or damaged, or has no ``model_state_dict``.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: there is no such file; check the path") from error
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path}: not a checkpoint that torch.load(weights_only=True) reads: {one_line(error)}"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model_state_dict"), dict):
        raise CheckpointError(
            f"{path}: the file has no key model_state_dict; load its weights with "
            "trainer.module.load_state_dict()"
        )
    return content


def apply_file(
    path: Path,
    content: dict[str, Any],
    state: TrainingState,
    *,
    ranks: int,
    advance: Callable[[int], None],
) -> Restored:
    """Restore the content of a file in place; the random generators only from one rank to one rank.

    Args:
        ranks: number of ranks of this training.
        advance: called with the step if the file has no count of steps.

    Raises:
        CheckpointError: the state does not fit the model or the optimizer; nothing was changed.
    """
    model, notes = bare(state.model), []
    weights = content["model_state_dict"]
    nn.modules.utils.consume_prefix_in_state_dict_if_present(weights, "module.")
    require_same_model(weights, model.state_dict())
    step = int(content.get("step") or 0)
    for name in _OPTIONAL:
        part, saved = getattr(state, name), content.get(f"{name}_state_dict")
        if part is not None and saved:
            try:
                part.load_state_dict(saved)
            except (ValueError, KeyError, TypeError) as error:
                raise CheckpointError(
                    f"{path}: the state of the {name} does not fit: {one_line(error)}"
                ) from error
        elif part is not None:
            notes.append(f"the file has no state of the {name}, which starts new")
    model.load_state_dict(weights)
    scaler = content.get("scaler_state_dict") or {}
    state.scaler.load_state_dict(scaler)
    if "steps" not in scaler:
        advance(step)
    if state.averages is not None:
        averages, saved = state.averages.tensors(), content.get("ema") or {}
        with torch.no_grad():
            for name in averages.keys() & saved.keys():
                averages[name].copy_(saved[name])
        state.averages.restart(averages.keys() - saved.keys())
    if content.get("ranks") == ranks == 1 and content.get("generators"):
        notes += capture.apply_rank(content["generators"])
    elif ranks > 1:
        notes.append(
            "the file has no random generators of the ranks; a folder of checkpoints has them"
        )
    extra = {"extra": content.get("extra") or {}}
    return Restored(step, extra, None, dict(content.get("metadata") or {}), tuple(notes), step)


def numbers(value: Any) -> Any:
    """Return ``value`` with the loss in place of each StepResult."""
    if isinstance(value, StepResult):
        return float(value)
    if type(value) is dict:
        return {key: numbers(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(numbers, value))
    return value
