"""Weights in the formats of other programs and of hpcrun: names, shapes, and tensors when needed."""

import json
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hpcrun.checkpoint.export import INDEX_OF_SHARDS, newest_readable
from hpcrun.checkpoint.stored_model import StoredModel
from hpcrun.errors import UserError, one_line
from hpcrun.storage.disk import again_if_stale
from hpcrun.storage.manifest import MANIFEST, committed_steps
from hpcrun.storage.store import CheckpointStore

_DCP = ".metadata"
_READABLE = (
    "a file of safetensors, or a folder of safetensors, DCP (.metadata) or hpcrun's checkpoints"
)


@dataclass(frozen=True)
class WeightSource:
    """Tensors of a file or folder.

    Attributes:
        source: the file or folder.
        shapes: the shape of each tensor by its name in the file.
        read: returns the tensors of some names on the CPU; raises UserError for a damaged file.
        files: the file of each tensor, if each is in one file.
        whole_model: False if the source may hold more than a model, such as the state of an optimizer.
    """

    source: Path
    shapes: Mapping[str, tuple[int, ...]]
    read: Callable[[Iterable[str]], dict[str, Tensor]]
    files: Mapping[str, Path] = field(default_factory=dict)
    whole_model: bool = True


def open_weights(source: Path) -> WeightSource:
    """Return the weights in ``source``.

    A folder of hpcrun is a run directory, a folder with checkpoints (then the newest valid step), or a step.

    Raises:
        UserError: there is no such file or folder, its format is not known, or it cannot be read.
    """
    if source.is_file():
        return _safetensors(source, [source])
    if not source.is_dir():
        raise UserError(f"{source} does not exist; name {_READABLE}")
    if (source / _DCP).is_file():
        return _distributed(source)
    for folder in (source, source / "checkpoints"):
        if committed_steps(path.name for path in folder.glob("step-*")):
            return _committed(folder, None)
    if (source / MANIFEST).is_file() and (steps := committed_steps([source.name])):
        return _committed(source.parent, steps[0])
    if (source / INDEX_OF_SHARDS).is_file():
        return _safetensors(source, _indexed(source / INDEX_OF_SHARDS))
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise UserError(f"{source} has no file *.safetensors; name {_READABLE}")
    return _safetensors(source, files)


def _indexed(index: Path) -> list[Path]:
    """Return the files that Hugging Face's index names; raises UserError if one is missing."""
    try:
        files = sorted(
            {
                str(name)
                for name in json.loads(again_if_stale(index.read_bytes))["weight_map"].values()
            }
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} cannot be read: {one_line(error)}; copy it again") from error
    for name in files:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise UserError(
                f"{index} names {name}, which does not exist; copy it to {index.parent}"
            )
    return [index.parent / name for name in files]


def _safetensors(source: Path, paths: Iterable[Path]) -> WeightSource:
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise UserError(
            "needs the package safetensors: `pip install hpcrun[safetensors]`"
        ) from error
    files: dict[str, Path] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    opened: dict[Path, Any] = {}  # mapped into memory
    for file in paths:
        try:
            opened[file] = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read: {one_line(error)}; copy it again") from error
        for name in opened[file].keys():  # noqa: SIM118
            if name in files:
                raise UserError(f"{name} is in {files[name]} and in {file}; remove one")
            files[name] = file
            shapes[name] = tuple(opened[file].get_slice(name).get_shape())

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        return {name: opened[files[name]].get_tensor(name) for name in names}

    return WeightSource(source, shapes, read, files)


def _committed(root: Path, step: int | None) -> WeightSource:
    store = CheckpointStore(root, "weights-0")
    if step is None:
        step = newest_readable(store)
    store.require_private([step])
    model = StoredModel(store, step)

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        return model.tensors(names)

    shapes = {name: entry.shape for name, entry in model.entries.items()}
    return WeightSource(store.path(step), shapes, read)


def _distributed(source: Path) -> WeightSource:
    """Return the tensors of a DCP folder, with any number of files and any sharding."""
    reader = _Reader(source)
    with _explained(source):
        metadata = again_if_stale(reader.read_metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=True)
        entries: dict[str, Any] = {
            name: entry
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def read(names: Iterable[str]) -> dict[str, Tensor]:
        into = {
            name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
            for name in names
        }
        # Not dcp.load(): it reads the metadata, of many megabytes, at each call.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with _explained(source):
            planner.set_up_planner(dict(into), metadata, is_coordinator=True)
            plan = planner.finish_plan(planner.create_local_plan())
            again_if_stale(lambda: reader.read_data(plan, planner).wait())
        return into

    shapes = {name: tuple(entry.size) for name, entry in entries.items()}
    return WeightSource(source, shapes, read, whole_model=False)


@contextmanager
def _explained(source: Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except Exception as error:  # of any type: those of pickle, of files, and torch's own
        words = f"{source} cannot be read: {one_line(error)}; copy it again, or save it again"
        raise UserError(words) from error


class _Reader(FileSystemReader):
    """A reader of DCP that reads the metadata, a pickle, without running code."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        path = Path(self.path) / _DCP
        with path.open("rb") as stream:
            metadata = _MetadataUnpickler(stream).load()
        if not isinstance(metadata, Metadata):
            raise UserError(f"{path} holds no metadata of torch.distributed.checkpoint")
        return metadata


_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        *("BytesStorageMetadata", "ChunkStorageMetadata", "Metadata", "MetadataIndex"),
        *("StorageMeta", "TensorProperties", "TensorStorageMetadata", "_MEM_FORMAT_ENCODING"),
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "torch": {"Size", *(name for name in dir(torch) if type(getattr(torch, name)) is torch.dtype)},
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath"},
    "pathlib._local": {"Path", "PosixPath"},
}


def _member(kind: Any, name: str) -> Any:
    """Return a member of the only enumeration in metadata: Python 3.11 pickles it as a call of getattr."""
    if getattr(kind, "__name__", "") != "_MEM_FORMAT_ENCODING":
        raise UserError(f"{_DCP} calls getattr of {kind}, so it is not read: it could run code")
    return kind[name]


class _MetadataUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("builtins", "getattr"):
            return _member
        if name not in _CLASSES.get(module, ()):
            raise UserError(
                f"{_DCP} names {module}.{name}, which is no metadata, so it is not read: it could run code"
            )
        return super().find_class(module, name)
