"""Export of the model to a file or folder, which PyTorch or safetensors reads without hpcrun.

A folder of safetensors needs memory for one shard, every other format for the whole model.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import StorageMeta

from hpcrun.checkpoint.export_progress import ExportProgress
from hpcrun.checkpoint.sharded.copies import in_groups
from hpcrun.checkpoint.stored_model import StoredModel
from hpcrun.drafts import SPECIAL, draft_folder, is_special, sync
from hpcrun.errors import one_line
from hpcrun.printing import Progress
from hpcrun.storage.errors import CheckpointError, explained
from hpcrun.storage.retention import Retention
from hpcrun.storage.store import CheckpointStore

SUFFIXES = {".safetensors": "safetensors", ".pt": "pt", ".pth": "pt"}
"""The format of each suffix of a file."""
_UNKNOWN_TO_SAFETENSORS = ("complex32", "complex128")


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
    store: CheckpointStore,
    step: int,
    target: Path,
    *,
    kind: str | None = None,
    averaged: bool = False,
    beside: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Write the verified model of ``step`` under its canonical names to ``target``.

    The file or folder appears complete or not at all. Equal tensors of equal steps give equal bytes, whatever
    the name, time and machine, with the same versions of torch and safetensors.
    ``torch.load(weights_only=True)`` reads ``.pt`` as a state dict. safetensors needs the package of that
    name, and holds only tensors.

    Args:
        kind: ``dcp`` (makes a new folder), ``safetensors`` (a file if ``target`` has the suffix, else a new
            folder of shards) or ``pt``; None: that of the suffix.
        averaged: replace the weights by their averages (``train.ema``).
        beside: text files to add to a folder of safetensors, by name.
        progress: called in a thread with the bytes that were read and written, and their total.

    Returns:
        ``tensors``, their number, and ``bytes``, the size of the file or of the files.

    Raises:
        CheckpointError: the format and the name do not fit, safetensors is not installed, a value is no
            tensor, the folder is missing or exists already, the checkpoint is damaged, or a write failed.
    """
    kind, as_folder = _format_of(target, kind)
    if kind == "safetensors":
        _require_safetensors(target)
    if not target.parent.is_dir():
        raise CheckpointError(
            f"{target}: the folder {target.parent} does not exist; create it first"
        )
    if as_folder and os.path.lexists(target):
        raise CheckpointError(f"{target}: exists already; remove it, or name a new folder")
    if is_special(target):
        raise CheckpointError(f"{target}: {SPECIAL}; choose another name")
    model = StoredModel(store, step, averaged=averaged)
    if kind == "safetensors":
        _require_tensors(model, target)
    # A folder: safetensors makes another temporary file next to the file.
    with explained("be written", target), draft_folder(target) as folder:
        draft = folder / target.name
        counted = ExportProgress()
        try:
            with counted.reported(progress, folder, sum(_sizes(model).values())):
                _write(model, draft, kind, step, counted.read, as_folder=as_folder)
            if as_folder and kind == "safetensors":
                for name, text in (beside or {}).items():
                    (draft / name).write_text(text, encoding="utf-8")
                    sync(draft / name)
        except (OSError, CheckpointError):
            raise
        except Exception as error:  # the formats raise their own types, also for a full disk
            raise CheckpointError(
                f"{target}: cannot be written: {one_line(error)}; check the free space"
            ) from error
        files = [*draft.iterdir()] if as_folder else [draft]
        size = sum(file.stat().st_size for file in files)
        sync(draft)
        draft.rename(target)
        sync(target.parent)
    return {"tensors": len(model.entries), "bytes": size}


def _format_of(target: Path, kind: str | None) -> tuple[str, bool]:
    """Return the format, and True if it makes a folder; raises CheckpointError if the name does not fit."""
    of_suffix = SUFFIXES.get(target.suffix)
    if kind is None and of_suffix is None:
        raise CheckpointError(
            f"{target}: unknown format; end it in {', '.join(SUFFIXES)}, or name a folder and give --format"
        )
    kind = kind or of_suffix
    if of_suffix not in (None, kind):
        raise CheckpointError(f"{target}: has the suffix of another format than {kind}; change one")
    if kind == "pt" and of_suffix is None:
        raise CheckpointError(f"{target}: the format pt is one file; end it in .pt")
    assert kind is not None
    return kind, of_suffix is None


def _write(
    model: StoredModel, draft: Path, kind: str, step: int, read: Progress, *, as_folder: bool
) -> None:
    about = {"format": "pt", "step": str(step)}
    if as_folder:
        draft.mkdir()
        if kind == "dcp":
            write_dcp(model.state(read), draft)
        else:
            write_shards(model, draft, about, read=read)
    elif kind == "pt":
        # torch names the folder inside the archive after the file.
        archive = draft.with_name("archive.pt")
        torch.save(model.state(read), archive)
        archive.rename(draft)
    else:
        _save_safetensors(model.tensors(model.entries, read), draft, about)


def _require_safetensors(target: Path) -> None:
    try:
        import safetensors.torch  # noqa: F401
    except ImportError as error:
        raise CheckpointError(
            f"{target}: needs the package safetensors: `pip install hpcrun[safetensors]`, or export to .pt"
        ) from error


def _require_tensors(model: StoredModel, target: Path) -> None:
    wrong = dict.fromkeys(model.others, "not a tensor")
    for name, entry in model.entries.items():
        if entry.dtype in _UNKNOWN_TO_SAFETENSORS:
            wrong[name] = f"torch.{entry.dtype}"
    for name, what in wrong.items():
        raise CheckpointError(
            f"{target}: {name} is {what}, which safetensors cannot store; export to .pt, or with --format dcp"
        )


def _save_safetensors(
    tensors: dict[str, torch.Tensor], path: Path, metadata: Mapping[str, str]
) -> None:
    """Write ``tensors`` to ``path``; equal tensors and metadata give equal bytes."""
    from safetensors.torch import save_file

    save_file(tensors, path, metadata=dict(metadata))
    # save_file() writes the metadata in an order that differs between two calls.
    with path.open("r+b") as stream:
        length = int.from_bytes(stream.read(8), "little")
        header = json.loads(stream.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) > length:
            raise CheckpointError(f"{path}: the header of safetensors has an unknown form")
        stream.seek(8)
        stream.write(text.ljust(length))


INDEX_OF_SHARDS = "model.safetensors.index.json"
SHARD = 5_000_000_000
"""Bytes of a shard of safetensors, as in Hugging Face's ``save_pretrained``."""


def write_shards(
    model: StoredModel,
    folder: Path,
    metadata: Mapping[str, str],
    limit: int = SHARD,
    read: Progress = lambda *_: None,
) -> None:
    """Write files of at most ``limit`` bytes of tensors, with the names and the index of Hugging Face.

    A tensor is never divided. A single shard is ``model.safetensors``, without an index.

    Args:
        read: called for each shard with the bytes that were read, and its bytes.
    """
    sizes = _sizes(model)
    shards = [*in_groups(sizes, limit)]
    places: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        file = "model.safetensors" if len(shards) == 1 else file
        _save_safetensors(model.tensors(names, read), folder / file, metadata)
        sync(folder / file)
        places |= dict.fromkeys(names, file)
    if len(shards) > 1:
        index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places}
        (folder / INDEX_OF_SHARDS).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
        sync(folder / INDEX_OF_SHARDS)


class _Writer(FileSystemWriter):
    """A writer that records neither the path nor a random id: equal states give equal bytes."""

    def storage_meta(self) -> StorageMeta:
        return StorageMeta()


def _sizes(model: StoredModel) -> dict[str, int]:
    """Return the bytes of each tensor."""
    return {
        name: sum(piece.place.length for piece in entry.pieces)
        for name, entry in model.entries.items()
    }


def write_dcp(state: dict[str, Any], folder: Path) -> None:
    """Write a checkpoint that ``torch.distributed.checkpoint.load`` reads into ``model.state_dict()``."""
    writer = _Writer(folder, thread_count=1)
    planner = DefaultSavePlanner()
    # Not dcp.save(): its CheckpointException, a BaseException, would hide the cause.
    writer.reset(folder)
    planner.set_up_planner(state, writer.storage_meta(), is_coordinator=True)
    writer.set_up_storage_writer(is_coordinator=True)
    plan = writer.prepare_local_plan(planner.create_local_plan())
    plans, metadata = planner.create_global_plan([plan])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner).wait()
    writer.finish(metadata, [written])
