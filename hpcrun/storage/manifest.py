"""The manifest: it lists the files of a committed checkpoint, and detects its own damage.

:func:`decode` accepts only the exact encoding of :func:`encode`, which includes a hash of the manifest. A
flipped bit is always detected, even in white space.
"""

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import xxhash

from hpcrun.run.directory import RunDirectory
from hpcrun.storage.disk import LOCAL, blocks
from hpcrun.storage.errors import CheckpointError, DamagedCheckpoint

MANIFEST = "manifest.json"
MANIFEST_LIMIT = 64 << 20
"""Bytes of a manifest that are read at most."""
_FORMAT = 1
_FILE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._+-]{0,199}")
_OWNER = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,127}")


@dataclass(frozen=True)
class FileRecord:
    """Name of a file, its size in bytes, and the hexadecimal XXH3-128 of its content."""

    name: str
    size: int
    xxh3: str


@dataclass(frozen=True)
class Manifest:
    """Manifest of a checkpoint after ``step`` optimizer steps, written by ``world_size`` ranks of ``owner``.

    ``created`` is in unix seconds; ``meta`` is plain JSON for the caller.
    """

    step: int
    world_size: int
    owner: str
    created: float
    files: tuple[FileRecord, ...]
    meta: Mapping[str, Any]

    @property
    def size(self) -> int:
        """Return the total size of all files in bytes."""
        return sum(record.size for record in self.files)

    def record(self, name: str) -> FileRecord:
        """Return the record of the file ``name``; raises DamagedCheckpoint if there is none."""
        for record in self.files:
            if record.name == name:
                return record
        raise DamagedCheckpoint(f"{name}: not in the manifest of step {self.step}")


def encode(manifest: Manifest) -> bytes:
    """Return the only accepted encoding of ``manifest``.

    Raises:
        CheckpointError: ``meta`` is not plain JSON, or a name is not allowed.
    """
    require_owner(manifest.owner)
    for record in manifest.files:
        require_file_name(record.name)
    body = {"format": _FORMAT, **asdict(manifest)}
    try:
        return _text({**body, "xxh3": xxhash.xxh3_128_hexdigest(_text(body))})
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"meta of step {manifest.step} is not plain JSON: {error}") from error


def decode(raw: bytes) -> Manifest:
    """Return the manifest encoded in ``raw``.

    Raises:
        DamagedCheckpoint: ``raw`` differs from its encoding.
        CheckpointError: another version of hpcrun has written ``raw`` in its format.
    """
    try:
        values = json.loads(raw)
        digest = values["xxh3"]
        body = {key: value for key, value in values.items() if key != "xxh3"}
        # The hash is right: this is no damage, after which a restore would use an older step.
        newer = values["format"] != _FORMAT and digest == xxhash.xxh3_128_hexdigest(_text(body))
        if not newer:
            manifest = Manifest(
                step=int(values["step"]),
                world_size=int(values["world_size"]),
                owner=str(values["owner"]),
                created=float(values["created"]),
                files=tuple(FileRecord(**record) for record in values["files"]),
                meta=values["meta"],
            )
            whole = encode(manifest) == raw
    except (ValueError, KeyError, TypeError, RecursionError, CheckpointError) as error:
        raise DamagedCheckpoint("not a valid manifest") from error
    if newer:
        raise CheckpointError(
            f"format {values['format']!r}, but this hpcrun reads {_FORMAT}; use the version that saved it"
        )
    if not whole:
        raise DamagedCheckpoint("its content does not match its own hash")
    return manifest


def newest_manifest(root: Path) -> Manifest | None:
    """Return the manifest of the newest checkpoint in ``root`` that has a valid manifest; None without any.

    The files that it lists are not checked. A restore reports unreadable manifests.
    """
    names: list[str] = []
    with suppress(OSError):
        names = [path.name for path in root.iterdir()]
    for step in committed_steps(names):
        with suppress(OSError, CheckpointError):
            path = root / step_name(step) / MANIFEST
            return decode(b"".join(blocks(LOCAL, path, MANIFEST_LIMIT, patience=0.0)))
    return None


def require_file_name(name: str) -> None:
    """Raise CheckpointError unless ``name`` is a plain file name that cannot leave its folder."""
    if not _FILE.fullmatch(name) or name == MANIFEST:
        raise CheckpointError(f"{name!r}: not a file name for a checkpoint")


def require_owner(owner: str) -> None:
    """Raise CheckpointError unless ``owner`` can be part of a folder's name."""
    if not _OWNER.fullmatch(owner):
        raise CheckpointError(
            f"{owner!r}: not a valid owner; use job and restart, such as '4711-0'"
        )


def _text(values: Mapping[str, Any]) -> bytes:
    return (json.dumps(values, indent=1) + "\n").encode()


_COMMITTED = re.compile(r"step-(\d{9,})")


def step_name(step: int) -> str:
    """Return the name of the folder of ``step``."""
    return f"step-{step:09d}"


def committed_steps(names: Iterable[str]) -> list[int]:
    """Return the committed steps, newest first, from the names in the folder of checkpoints."""
    found = (_COMMITTED.fullmatch(name) for name in names)
    return sorted((int(match[1]) for match in found if match), reverse=True)


def has_commit(run: RunDirectory) -> bool:
    """Return True if a checkpoint has a manifest, which is not read: that of many ranks is long."""
    found: list[Path] = []
    with suppress(OSError):
        found = [*run.checkpoints.glob(f"step-*/{MANIFEST}")]
    return bool(committed_steps(path.parent.name for path in found))
