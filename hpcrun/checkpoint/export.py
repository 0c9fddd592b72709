"""The model out of a checkpoint, in one file that plain PyTorch or safetensors reads: no import of ours."""

import os
import secrets
from pathlib import Path
from typing import Any

import torch

from hpcrun.checkpoint.errors import CheckpointError, explained
from hpcrun.checkpoint.holds import hold
from hpcrun.checkpoint.reading import StoreReader
from hpcrun.checkpoint.store import CheckpointStore

FORMATS = (".safetensors", ".pt", ".pth")
_MODEL = "model/"


def newest_readable(store: CheckpointStore) -> int:
    """The newest step whose manifest is whole; raises CheckpointError when there is none."""
    manifest = store.newest_valid()
    if manifest is None:
        raise CheckpointError(f"{store.root}: there is no whole checkpoint")
    return manifest.step


def export_model(store: CheckpointStore, step: int, target: Path) -> dict[str, Any]:
    """Write the model's tensors of ``step``, checked, under their canonical names to ``target``.

    The file appears whole or not at all. ``.pt`` is what ``torch.load(weights_only=True)`` gives back as a
    state dict; ``.safetensors`` needs the package of that name.

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
        state = load_model(store, step)
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


def load_model(store: CheckpointStore, step: int) -> dict[str, torch.Tensor]:
    """The model's state dict of ``step``, whole tensors on the CPU, every byte checked.

    Raises:
        DamagedCheckpoint: naming the file.
        CheckpointError: there is no model in it.
    """
    reader = StoreReader(store, step)
    into = {name: reader.empty(name) for name in reader.index.tensors if name.startswith(_MODEL)}
    if not into:
        raise CheckpointError(f"{store.path(step)}: holds no model")
    reader.load(into)
    return {name.removeprefix(_MODEL): value for name, value in into.items()}


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
