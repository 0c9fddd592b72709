"""The model out of a checkpoint, in one file that plain PyTorch or safetensors reads: no import of ours."""

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from hpcrun.checkpoint.errors import CheckpointError, explained
from hpcrun.checkpoint.holds import hold
from hpcrun.checkpoint.reading import StoreReader
from hpcrun.checkpoint.retention import Retention
from hpcrun.checkpoint.store import CheckpointStore

FORMATS = (".safetensors", ".pt", ".pth")
_MODEL, _AVERAGES = "model/", "ema/"


def newest_readable(store: CheckpointStore) -> int:
    """The newest step whose manifest is whole; raises CheckpointError when there is none."""
    manifest = store.newest_valid()
    if manifest is None:
        raise CheckpointError(f"{store.root}: there is no whole checkpoint")
    return manifest.step


def best_readable(store: CheckpointStore) -> int:
    """The step with the lowest validation loss, of equal ones the latest; raises CheckpointError."""
    metas = {step: manifest.meta for step, manifest in store.valid().items()}
    best = Retention(best=1).protected(metas)
    if not best:
        raise CheckpointError(
            f"{store.root}: no checkpoint there has a validation loss; set train.validate_every and "
            "checkpoint.keep_best, or leave --best out"
        )
    return best.pop()


def export_model(
    store: CheckpointStore, step: int, target: Path, *, averaged: bool = False
) -> dict[str, Any]:
    """Write the model's tensors of ``step``, checked, under their canonical names to ``target``.

    The file appears whole or not at all. ``.pt`` is what ``torch.load(weights_only=True)`` gives back as a
    state dict; ``.safetensors`` needs the package of that name.

    Args:
        averaged: with the averages of the weights (``train.ema``) in their place.

    Returns:
        ``tensors``, their number, and ``bytes``.

    Raises:
        CheckpointError: unknown suffix, no safetensors here, a damaged checkpoint, a disk that refuses.
    """
    if target.suffix not in FORMATS:
        raise CheckpointError(f"{target}: unknown format; end it in {', '.join(FORMATS)}")
    if target.suffix == ".safetensors":
        _require_safetensors(target)
    with hold(store.root, step):
        state = load_model(store, step, averaged=averaged)
    part = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    with explained("be written", target):
        try:
            if target.suffix == ".safetensors":
                _save_safetensors(state, part, step)
            else:
                torch.save(state, part)
            with part.open("rb") as stream:
                os.fsync(stream.fileno())
            part.replace(target)
        finally:
            part.unlink(missing_ok=True)
    return {"tensors": len(state), "bytes": target.stat().st_size}


def load_model(
    store: CheckpointStore, step: int, *, averaged: bool = False
) -> dict[str, torch.Tensor]:
    """The model's state dict of ``step``, whole tensors on the CPU, every byte checked.

    Raises:
        DamagedCheckpoint: naming the file.
        CheckpointError: there is no model in it, or no averages of its weights.
    """
    reader = StoreReader(store, step)
    model = _found(reader, _MODEL)
    if not model:
        raise CheckpointError(f"{store.path(step)}: holds no model")
    if averaged:
        averages = _found(reader, _AVERAGES)
        if not averages:
            raise CheckpointError(f"{store.path(step)}: holds no averages; train with train.ema")
        # What has no average (buffers, frozen weights) is the model's own.
        model |= averages
    into = {name: reader.empty(name) for name in model.values()}
    reader.load(into)
    return {name: into[stored] for name, stored in model.items()}


def _found(reader: StoreReader, prefix: str) -> dict[str, str]:
    """The names of the checkpoint's tensors under ``prefix``, by the names they have there."""
    names = [name for name in reader.index.tensors if name.startswith(prefix)]
    return {name.removeprefix(prefix): name for name in names}


def _require_safetensors(target: Path) -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"{target}: needs the package safetensors: `pip install hpcrun[safetensors]`, or export to .pt"
        ) from error


def _save_safetensors(state: dict[str, torch.Tensor], part: Path, step: int) -> None:
    from safetensors.torch import save_file

    save_file(state, part, metadata={"format": "pt", "step": str(step)})
