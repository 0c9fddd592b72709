"""A file system that refuses to read proves no damage: the checkpoint stays the newest."""

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystemReader

from hpcrun.checkpoint.export import export_model
from hpcrun.checkpoint.stored_model import StoredModel
from hpcrun.checkpoint.weights import open_weights
from hpcrun.errors import UserError
from hpcrun.storage.disk import FileSystem
from hpcrun.storage.errors import CheckpointError, ReadFailure
from hpcrun.storage.manifest import newest_manifest
from hpcrun.storage.store import CheckpointStore

from . import single_rank
from .faults import Broken, Flipping, Stale
from .test_quarantine import flip, names


@pytest.fixture
def two(root: Path) -> Path:
    """Return the folder of the checkpoints 1 and 2."""
    saving = single_rank.engine(root, "7-0")
    for step in (1, 2):
        assert single_rank.save(saving, step).ok
    return root


@pytest.mark.parametrize(
    "code",
    [errno.EIO, errno.ESTALE, errno.EACCES, errno.ENOTCONN, errno.ETIMEDOUT, errno.ECONNRESET],
)
@pytest.mark.parametrize(
    "part", ["manifest.json", "index.json", "rank-00000.bin", "step-000000002"]
)
def test_a_refusal_to_read_is_a_failure_of_the_node(two: Path, part: str, code: int) -> None:
    fs = Broken("open", part, code)
    with pytest.raises(ReadFailure) as failed:
        single_rank.engine(two, "7-1", fs).restore(single_rank.nothing)
    assert failed.value.here
    assert errno.errorcode[code] in str(failed.value)
    assert "is kept, and another node may be able to read it" in str(failed.value)
    assert "another --name" not in str(failed.value)
    assert names(two) == ["step-000000001", "step-000000002"]
    single_rank.require_state(single_rank.restored(two), 2)


@pytest.mark.parametrize(
    "part", ["manifest.json", "index.json", "rank-00000.bin", "step-000000002", "checkpoints"]
)
def test_a_stale_handle_is_opened_again_once(two: Path, part: str) -> None:
    readers: list[Callable[[FileSystem], object]] = [
        lambda fs: single_rank.engine(two, "7-1", fs).restore(single_rank.nothing),
        lambda fs: CheckpointStore(two, "7-1", fs=fs, patience=0).check(2),
        lambda fs: StoredModel(CheckpointStore(two, "7-1", fs=fs, patience=0), 2).state()["w"],
    ]
    descriptors = len(list(Path("/proc/self/fd").iterdir()))
    for read in readers:
        read(fs := Stale(part, 1))
        assert fs.left == 0
        with pytest.raises(CheckpointError, match="ESTALE"):
            read(Stale(part, 2))
    found = single_rank.engine(two, "7-1", Stale(part, 1)).restore(single_rank.nothing)
    single_rank.require_state(found, 2)
    assert found is not None
    assert found.notes == ()
    assert names(two) == ["step-000000001", "step-000000002"]
    assert len(list(Path("/proc/self/fd").iterdir())) == descriptors


def test_a_stale_manifest_outside_of_a_restore_is_opened_again(
    two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, left = os.preadv, iter([True])

    def stale(*arguments: Any) -> int:
        if next(left, False):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(*arguments)

    monkeypatch.setattr(os, "preadv", stale)
    newest = newest_manifest(two)
    assert newest is not None
    assert newest.step == 2
    assert next(left, None) is None


def test_stale_handles_of_weights_of_others_are_opened_again(
    tmp_path: Path, two: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "dcp"
    export_model(CheckpointStore(two, "7-1"), 2, folder, kind="dcp")
    read, left = FileSystemReader.read_data, iter([True])

    def stale(*arguments: Any) -> Any:
        if next(left, False):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return read(*arguments)

    monkeypatch.setattr(FileSystemReader, "read_data", stale)
    weights = open_weights(folder)
    assert torch.equal(weights.read(["w"])["w"], single_rank.state(2)["model"]["w"])
    assert next(left, None) is None
    left = iter([True, True])
    with pytest.raises(UserError, match="Stale file handle"):
        weights.read(["w"])


def test_a_folder_that_cannot_be_listed_blames_the_node(two: Path) -> None:
    fs = Broken("names", "checkpoints", errno.ESTALE)
    with pytest.raises(ReadFailure, match=r"cannot be listed: Stale file handle \(ESTALE\)"):
        single_rank.engine(two, "7-1", fs).restore(single_rank.nothing)


def test_a_refused_read_before_damaged_checkpoints_is_not_damage(two: Path) -> None:
    flip(two / "step-000000002" / "rank-00000.bin")
    fs = Broken("open", "step-000000001", errno.EIO)
    with pytest.raises(ReadFailure, match=r"step-000000001/manifest\.json: cannot be read"):
        single_rank.engine(two, "7-1", fs).restore(single_rank.nothing)
    flip(two / "step-000000001" / "rank-00000.bin")
    with pytest.raises(CheckpointError, match=r"no checkpoint is valid.*another --name"):
        single_rank.engine(two, "7-1").restore(single_rank.nothing)


def test_checkpoints_of_a_newer_format_cause_no_restart_from_zero(two: Path) -> None:
    for step in (1, 2):
        manifest = two / f"step-{step:09d}" / "manifest.json"
        values = json.loads(manifest.read_text()) | {"format": 2}
        del values["xxh3"]
        digest = xxhash.xxh3_128_hexdigest(f"{json.dumps(values, indent=1)}\n".encode())
        manifest.write_text(f"{json.dumps({**values, 'xxh3': digest}, indent=1)}\n")
    with pytest.raises(CheckpointError, match=r"format 2, but .*; use the version that") as refused:
        single_rank.engine(two, "7-1").restore(single_rank.nothing)
    assert "another --name" not in str(refused.value)
    assert names(two) == ["step-000000001", "step-000000002"]


def test_a_folder_in_place_of_a_file_is_damage(two: Path) -> None:
    manifest = two / "step-000000002" / "manifest.json"
    manifest.unlink()
    manifest.mkdir()
    single_rank.require_state(single_rank.restored(two), 1)


@pytest.mark.parametrize("part", ["manifest.json", "index.json"])
def test_rank_0_checks_twice_before_a_fallback(two: Path, part: str) -> None:
    found = single_rank.engine(two, "7-1", Flipping(part, once=True)).restore(single_rank.nothing)
    single_rank.require_state(found, 2)
    assert found is not None
    assert found.notes == ()


def test_a_single_rank_that_reads_wrong_bytes_renames_nothing(two: Path) -> None:
    engine = single_rank.engine(two, "7-1", Flipping("rank-00000.bin", once=True))
    with pytest.raises(
        ReadFailure, match=r"\(hash\); rank 0 \(.*\): reads the same files without damage"
    ):
        engine.restore(single_rank.nothing)
    assert single_rank.save(engine, 3).ok
    assert names(two) == ["step-000000002", "step-000000003"]
