"""Export of the model to a single file, which plain PyTorch or safetensors reads without hpcrun."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpcrun.checkpoint.sharded.rank_file import StoreReader
from hpcrun.checkpoint.sharded.restore import SHARED
from hpcrun.checkpoint.state.tree import join
from hpcrun.checkpoint.storage.draft_file import hold
from hpcrun.checkpoint.storage.errors import CheckpointError, explained
from hpcrun.checkpoint.storage.retention import Retention
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.drafts import draft_folder, sync
from hpcrun.errors import one_line

FORMATS = (".safetensors", ".pt", ".pth")
_MODEL, _AVERAGES = "model/", "ema/"
_UNKNOWN_TO_SAFETENSORS = (torch.complex32, torch.complex128)


def newest_readable(store: CheckpointStore) -> int:
    """Return the newest step with a valid manifest; raises CheckpointError if there is none."""
    manifest = store.newest_valid()
    if manifest is None:
        raise CheckpointError(f"{store.root}: there is no valid checkpoint")
    return manifest.step


def best_readable(store: CheckpointStore) -> int:
    """Return the step with the lowest validation loss (the latest of equals); raises CheckpointError."""
    metas = {step: manifest.meta for step, manifest in store.valid().items()}
    best = Retention(best=1).protected(metas)
    if not best:
        raise CheckpointError(
            f"{store.root}: no checkpoint has a validation loss; set train.validate_every and "
            "checkpoint.keep_best, pass metric= to Checkpointer.save(), or omit --best"
        )
    return best.pop()


def export_model(
    store: CheckpointStore, step: int, target: Path, *, averaged: bool = False
) -> dict[str, Any]:
    """Write the verified model of ``step`` under its canonical names to ``target``.

    The file appears complete or not at all. ``torch.load(weights_only=True)`` reads ``.pt`` as a state
    dict. ``.safetensors`` needs the package of that name, and holds only tensors.

    Args:
        averaged: replace the weights by their averages (``train.ema``).

    Returns:
        ``tensors``, their number, and ``bytes``, the size of the file.

    Raises:
        CheckpointError: unknown suffix, safetensors not installed, a value that is no tensor, a missing
            folder, a damaged checkpoint, or a failed write.
    """
    if target.suffix not in FORMATS:
        raise CheckpointError(f"{target}: unknown format; end it in {', '.join(FORMATS)}")
    if target.suffix == ".safetensors":
        _require_safetensors(target)
    if not target.parent.is_dir():
        raise CheckpointError(
            f"{target}: the folder {target.parent} does not exist; create it first"
        )
    with hold(store.root, step):
        state = load_model(store, step, averaged=averaged)
    write: Callable[[dict[str, Any], Path], None] = torch.save
    if target.suffix == ".safetensors":
        _require_tensors(state, target)
        write = _writer_of_safetensors(step)
    # A folder: safetensors makes a temporary file of its own next to the file.
    with explained("be written", target), draft_folder(target) as folder:
        draft = folder / target.name
        try:
            write(state, draft)
        except OSError:
            raise
        except Exception as error:  # the formats raise their own types, also for a full disk
            raise CheckpointError(
                f"{target}: cannot be written: {one_line(error)}; check the free space"
            ) from error
        sync(draft)
        draft.replace(target)
        sync(target.parent)
    tensors = sum(isinstance(value, torch.Tensor) for value in state.values())
    return {"tensors": tensors, "bytes": target.stat().st_size}


def load_model(store: CheckpointStore, step: int, *, averaged: bool = False) -> dict[str, Any]:
    """Return the model's state dict of ``step``: whole tensors on the CPU, every byte verified.

    The state dict includes the extra state of modules (``get_extra_state``).

    Raises:
        DamagedCheckpoint: a file is damaged; the text names it.
        CheckpointError: the checkpoint holds no model, or no averages of its weights.
    """
    reader = StoreReader(store, step)
    skeleton = reader.blob(SHARED).get("model")
    if not skeleton:
        raise CheckpointError(f"{store.path(step)}: contains no model")
    names = [name for name in reader.index.tensors if name.startswith(_MODEL)]
    stored = dict(zip(names, names, strict=True))
    if averaged:
        averages = [name for name in reader.index.tensors if name.startswith(_AVERAGES)]
        if not averages:
            raise CheckpointError(f"{store.path(step)}: contains no averages; train with train.ema")
        # Tensors without an average (buffers, frozen weights) come from the model.
        stored |= {_MODEL + name.removeprefix(_AVERAGES): name for name in averages}
    into = {name: reader.empty(name) for name in stored.values()}
    reader.load(into)
    state: dict[str, Any] = join(skeleton, {name: into[stored[name]] for name in stored})
    return state


def _require_safetensors(target: Path) -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"{target}: needs the package safetensors: `pip install hpcrun[safetensors]`, or export to .pt"
        ) from error


def _require_tensors(state: dict[str, Any], target: Path) -> None:
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.dtype in _UNKNOWN_TO_SAFETENSORS:
            what = value.dtype if isinstance(value, torch.Tensor) else "not a tensor"
            raise CheckpointError(
                f"{target}: {name} is {what}, which safetensors cannot store; export to .pt"
            )


def _writer_of_safetensors(step: int) -> Callable[[dict[str, Any], Path], None]:
    from safetensors.torch import save_file

    return lambda state, part: save_file(state, part, metadata={"format": "pt", "step": str(step)})
