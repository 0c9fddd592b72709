"""A checkpoint in one torch file (``.pt``, ``.pth``), as plain PyTorch programs write it.

The keys are ``model_state_dict``, ``optimizer_state_dict``, ``scaler_state_dict``, ``scheduler_state_dict``,
``ema``, ``step``, ``metadata``, ``extra``, ``ranks`` and ``generators``. Names of weights have no prefix of a
wrapper. The file loads with ``torch.load(path, map_location="cpu", weights_only=True)``.

A file lacks the random generators of the ranks other than 0, buffers that differ between ranks, and gradients
between the calls of an accumulation. A folder of checkpoints has them.
"""

import contextlib
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from hpcrun.checkpoint.outcome import Restored, SaveOutcome
from hpcrun.checkpoint.state import capture
from hpcrun.checkpoint.state.compatibility import require_same_kind, require_same_model
from hpcrun.checkpoint.state.generators import capture_generators, restore_generators
from hpcrun.checkpoint.state.hook_state import hooks_of
from hpcrun.checkpoint.state.training import TrainingState
from hpcrun.checkpoint.state.tree import bare
from hpcrun.drafts import replacing
from hpcrun.errors import UserError, one_line
from hpcrun.storage.errors import CheckpointError
from hpcrun.train.step.precision import StepResult

SUFFIXES = (".pt", ".pth")

_OF_OTHER_FILES = (".ckpt", ".bin", ".tar", ".pkl", ".pickle", ".safetensors")

_OPTIONAL = ("optimizer", "scheduler")
_KINDS: dict[str, Any] = {
    **dict.fromkeys(("optimizer_state_dict", "scheduler_state_dict", "scaler_state_dict"), dict),
    **dict.fromkeys(("ema", "metadata"), dict),
    "step": int | float | torch.Tensor,
}


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
    for hook in hooks_of([model]):
        if hook.take() is not None:
            kept = hook.name if hook.state is None else type(hook.state).__name__
            raise UserError(
                "a checkpoint file cannot hold the state that a communication hook has on each rank "
                f"({kept}); {remedy}"
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
        "generators": capture_generators(),
    }
    for name in _OPTIONAL if include_optimizer else ():
        part = getattr(state, name)
        content[f"{name}_state_dict"] = None if part is None else part.state_dict()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path, 0o666) as draft, _checksums():
            torch.save(content, draft)
    except (OSError, RuntimeError) as error:  # torch's writer turns a full disk into a RuntimeError
        line = f"{path}: {one_line(error)}"
        print(f"hpcrun: the checkpoint of step {step} was not saved: {line}", flush=True)
        return SaveOutcome(False, step, path, line, time.monotonic() - began)
    return SaveOutcome(True, step, path, None, time.monotonic() - began, path.stat().st_size)


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a file, with its tensors on the CPU.

    Raises:
        CheckpointError: the file is missing or damaged, has no ``model_state_dict``, or a key of it has
            another type.
    """
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path}: there is no such file; check the path") from error
    except Exception as error:  # damaged bytes may mean any instruction to the unpickler
        raise CheckpointError(
            f"{path}: not a checkpoint that torch.load(weights_only=True) reads: {one_line(error)}"
        ) from error
    if not isinstance(content, dict) or not isinstance(content.get("model_state_dict"), dict):
        raise CheckpointError(
            f"{path}: the file has no key model_state_dict; load its weights with "
            "trainer.module.load_state_dict()"
        )
    for key, kinds in _KINDS.items():
        if not isinstance(content.get(key), kinds | None):
            raise CheckpointError(
                f"{path}: {key} is a {type(content[key]).__name__}, which is not what hpcrun saves there; "
                "remove the key from the file"
            )
    weights = content["model_state_dict"]
    wrong = next((name for name in weights if not isinstance(name, str)), None)
    if wrong is not None:
        raise CheckpointError(f"{path}: model_state_dict has the key {wrong!r}, which is no text")
    if "ranks" in content:
        _require_intact(path)
    return content


@contextlib.contextmanager
def _checksums() -> Iterator[None]:
    """Let torch write the checksum of each tensor, which a program may have switched off."""
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(True)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(before)


def _require_intact(path: Path) -> None:
    """Raise CheckpointError if a checksum in the file is wrong; ``torch.load`` reads no checksum."""
    try:
        with zipfile.ZipFile(path) as archive:
            wrong = archive.testzip()
    except Exception as error:  # as in read_file()
        wrong = one_line(error)
    if wrong is not None:
        raise CheckpointError(
            f"{path}: the file is damaged (the checksum of {wrong} is wrong); load an older file"
        )


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
                if name == "optimizer":
                    for old, new in zip(saved["param_groups"], part.param_groups, strict=False):
                        require_same_kind(old, new, part)
                part.load_state_dict(saved)
            except CheckpointError:
                raise
            except Exception as error:  # the optimizer may be the user's
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
            fits = {
                name
                for name in averages.keys() & saved.keys()
                if _same(averages[name], saved[name])
            }
            for name in fits:
                averages[name].copy_(saved[name])
        state.averages.restart(averages.keys() - fits)
    if content.get("ranks") == ranks == 1 and content.get("generators"):
        try:
            notes += restore_generators(content["generators"])
        except Exception as error:  # each generator refuses in its own way
            notes.append(f"the random generators of the file do not fit: {one_line(error)}")
    elif ranks > 1:
        notes.append(
            "the file has no random generators of the ranks; a folder of checkpoints has them"
        )
    extra = {"extra": content.get("extra") or {}}
    return Restored(step, extra, None, dict(content.get("metadata") or {}), tuple(notes), step)


def _same(here: torch.Tensor, saved: Any) -> bool:
    return isinstance(saved, torch.Tensor) and saved.shape == here.shape


def numbers(value: Any) -> Any:
    """Return ``value`` with the loss in place of each StepResult."""
    if isinstance(value, StepResult):
        return float(value)
    if type(value) is dict:
        return {key: numbers(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(numbers, value))
    return value
