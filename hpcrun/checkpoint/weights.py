"""Weights in the formats of other programs and of hpcrun: names, shapes, and tensors when needed."""

import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from hpcrun.checkpoint.export_folder import INDEX_OF_SHARDS
from hpcrun.checkpoint.storage.draft_file import hold
from hpcrun.checkpoint.storage.errors import CheckpointError
from hpcrun.checkpoint.storage.manifest import MANIFEST, committed_steps
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.checkpoint.stored_model import StoredModel
from hpcrun.errors import UserError, one_line

_DCP = ".metadata"
_MODEL = "model."
_READABLE = (
    "a file of safetensors, or a folder of safetensors, DCP (.metadata) or hpcrun's checkpoints"
)


class WeightSource(ABC):
    """Tensors of a file or folder.

    Attributes:
        shapes: the shape of each tensor by its name in the file.
        whole_model: False if the source may hold more than a model, such as the state of an optimizer.
    """

    whole_model = True

    def __init__(self, source: Path) -> None:
        self.source = source
        self.shapes: dict[str, tuple[int, ...]] = {}

    @abstractmethod
    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Return the tensors ``names`` on the CPU.

        Raises:
            UserError: a file cannot be read, or is damaged.
        """

    def file_of(self, name: str) -> Path:
        """Return the file or folder that holds the tensor."""
        return self.source


def open_weights(source: Path) -> WeightSource:
    """Return the weights in ``source``.

    A folder of hpcrun is a run directory, a folder with checkpoints (then the newest valid step), or a step.

    Raises:
        UserError: there is no such file or folder, its format is not known, or it cannot be read.
    """
    if source.is_file():
        return _Safetensors(source, [source])
    if not source.is_dir():
        raise UserError(f"{source} does not exist; name {_READABLE}")
    if (source / _DCP).is_file():
        return _DistributedCheckpoint(source)
    for folder in (source, source / "checkpoints"):
        if committed_steps(path.name for path in folder.glob("step-*")):
            return _Committed(folder, None)
    if (source / MANIFEST).is_file() and (steps := committed_steps([source.name])):
        return _Committed(source.parent, steps[0])
    if (source / INDEX_OF_SHARDS).is_file():
        return _Safetensors(source, _indexed(source / INDEX_OF_SHARDS))
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise UserError(f"{source} has no file *.safetensors; name {_READABLE}")
    return _Safetensors(source, files)


def _indexed(index: Path) -> list[Path]:
    """Return the files that Hugging Face's index names; raises UserError if one is missing."""
    try:
        files = sorted(
            {str(name) for name in json.loads(index.read_bytes())["weight_map"].values()}
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f"{index} cannot be read: {one_line(error)}; copy it again") from error
    for name in files:
        if Path(name).name != name or not (index.parent / name).is_file():
            raise UserError(
                f"{index} names {name}, which does not exist; copy it to {index.parent}"
            )
    return [index.parent / name for name in files]


class _Safetensors(WeightSource):
    """Files of safetensors, which are mapped into memory."""

    def __init__(self, source: Path, files: Iterable[Path]) -> None:
        super().__init__(source)
        try:
            from safetensors import safe_open
        except ImportError as error:
            raise UserError(
                "needs the package safetensors: `pip install hpcrun[safetensors]`"
            ) from error
        self._open, self._files = safe_open, dict[str, Path]()
        for file in files:
            with self._opened(file) as opened:
                for name in opened.keys():  # noqa: SIM118
                    if name in self._files:
                        raise UserError(
                            f"{name} is in {self._files[name]} and in {file}; remove one"
                        )
                    self._files[name] = file
                    self.shapes[name] = tuple(opened.get_slice(name).get_shape())

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        by_file: dict[Path, list[str]] = {}
        for name in names:
            by_file.setdefault(self._files[name], []).append(name)
        found: dict[str, Tensor] = {}
        for file, inside in by_file.items():
            with self._opened(file) as opened:
                found |= {name: opened.get_tensor(name) for name in inside}
        return found

    def file_of(self, name: str) -> Path:
        return self._files[name]

    def _opened(self, file: Path) -> Any:
        from safetensors import SafetensorError

        try:
            return self._open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} cannot be read: {one_line(error)}; copy it again") from error


class _Committed(WeightSource):
    """The model of a checkpoint of hpcrun."""

    def __init__(self, root: Path, step: int | None) -> None:
        self._store = CheckpointStore(root, "weights-0")
        if step is None:
            manifest = self._store.newest_valid()
            if manifest is None:
                raise CheckpointError(f"{root}: there is no valid checkpoint")
            step = manifest.step
        super().__init__(self._store.path(step))
        self._step = step
        self._store.require_private([step])
        self._model = StoredModel(self._store, step)
        self.shapes = {name: entry.shape for name, entry in self._model.entries.items()}

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        with hold(self._store.root, self._step):
            return self._model.tensors(names)


class _DistributedCheckpoint(WeightSource):
    """A folder of torch.distributed.checkpoint, with any number of files and any sharding."""

    whole_model = False

    def __init__(self, source: Path) -> None:
        super().__init__(source)
        self._reader = _Reader(source)
        with self._explained():
            self._metadata = self._reader.read_metadata()
            self._reader.set_up_storage_reader(self._metadata, is_coordinator=True)
            for name, entry in self._metadata.state_dict_metadata.items():
                if isinstance(entry, TensorStorageMetadata):
                    self.shapes[name] = tuple(entry.size)

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        entries: Mapping[str, Any] = self._metadata.state_dict_metadata
        into = {
            name: torch.empty(entries[name].size, dtype=entries[name].properties.dtype)
            for name in names
        }
        # Not dcp.load(): it reads the metadata, of many megabytes, at each call.
        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        with self._explained():
            planner.set_up_planner(dict(into), self._metadata, is_coordinator=True)
            plan = planner.finish_plan(planner.create_local_plan())
            self._reader.read_data(plan, planner).wait()
        return into

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except UserError:
            raise
        except (
            Exception
        ) as error:  # of any type: torch raises those of pickle, of files and its own
            raise UserError(
                f"{self.source} cannot be read: {one_line(error)}; copy it again, or save it again"
            ) from error


class _Reader(FileSystemReader):
    """A reader of DCP whose metadata, a pickle, can run no code."""

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
