"""Every flipped bit, cut end and lost file is detected and named."""

import json
import random
import shutil

import pytest

from hpcrun.storage.errors import CheckpointError, DamagedCheckpoint
from hpcrun.storage.manifest import FileRecord, Manifest, decode, encode
from hpcrun.storage.store import CheckpointStore

from .faults import save

FILES = ("manifest.json", "shared.pt", "rank-00000.pt")


@pytest.fixture
def two(store):
    """Return a store with the valid checkpoints 1 and 2."""
    save(store, 1)
    save(store, 2)
    return store


def require_noticed(store, name):
    """Assert that a check reports ``name`` of step 2 as damaged, and step 1 as valid."""
    with pytest.raises(DamagedCheckpoint, match=name.replace(".", r"\.")):
        store.check(2)
    store.check(1)
    assert 1 in store.valid()


@pytest.mark.parametrize("name", FILES)
def test_every_random_bit_flip_is_noticed(two, name):
    path = two.path(2) / name
    whole = path.read_bytes()
    draw = random.Random(f"flips in {name}")
    for _ in range(60):
        damaged = bytearray(whole)
        damaged[draw.randrange(len(whole))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        require_noticed(two, name)
    path.write_bytes(whole)
    two.check(2)


@pytest.mark.parametrize("name", FILES)
def test_every_truncation_and_every_extension_is_noticed(two, name):
    path = two.path(2) / name
    whole = path.read_bytes()
    draw = random.Random(f"cuts of {name}")
    ends = [0, 1, len(whole) - 1] + [draw.randrange(len(whole)) for _ in range(20)]
    for damaged in [*(whole[:end] for end in ends), whole + b"\0", whole + whole]:
        path.write_bytes(damaged)
        require_noticed(two, name)
        assert two.newest_valid().step == 1


@pytest.mark.parametrize("name", FILES)
def test_a_missing_file_is_named_and_the_run_falls_back(two, name):
    (two.path(2) / name).unlink()
    with pytest.raises(DamagedCheckpoint, match=rf"{name}: cannot .*No such file"):
        two.inspect(2)
    assert two.newest_valid().step == 1


def test_a_link_is_not_followed_out_of_the_folder(two, tmp_path):
    path = two.path(2) / "shared.pt"
    elsewhere = tmp_path / "elsewhere"
    path.rename(elsewhere)
    path.symlink_to(elsewhere)
    require_noticed(two, "shared.pt")


def test_a_manifest_of_another_step_is_noticed(two):
    shutil.copy(two.path(1) / "manifest.json", two.path(2) / "manifest.json")
    require_noticed(two, "manifest.json")


def test_a_new_save_replaces_a_step_found_damaged(two):
    path = two.path(2) / "shared.pt"
    path.write_bytes(b"x" * path.stat().st_size)
    save(CheckpointStore(two.root, "7-1", patience=0), 2)
    two.check(2)
    assert [entry.name for entry in sorted(two.root.iterdir())] == [
        "step-000000001",
        "step-000000002",
    ]


def test_every_single_bit_of_a_manifest_is_guarded():
    manifest = Manifest(
        120, 8, "4711-0", 1e9, (FileRecord("shared.pt", 7, "0" * 32),), {"a": [1.5]}
    )
    whole = encode(manifest)
    assert decode(whole) == manifest
    for index in range(len(whole)):
        for bit in range(8):
            damaged = bytearray(whole)
            damaged[index] ^= 1 << bit
            with pytest.raises(DamagedCheckpoint):
                decode(bytes(damaged))


@pytest.mark.parametrize(
    "name", ["../shared.pt", "a/b", "/etc/passwd", "..", ".hidden", "", "a\nb", "manifest.json"]
)
def test_no_file_name_can_lead_out_of_the_folder(store, name):
    draft = store.begin(1)
    with pytest.raises(CheckpointError, match="not a file name"), store.open_file(draft, name):
        pass
    with pytest.raises(CheckpointError, match="not a file name"):
        encode(Manifest(1, 1, "7-0", 0.0, (FileRecord(name, 0, ""),), {}))


def test_a_forged_manifest_with_a_path_in_it_is_refused(two):
    path = two.path(2) / "manifest.json"
    path.write_text(path.read_text().replace('"shared.pt"', '"../x/y.pt"'))
    require_noticed(two, "manifest.json")
    assert json.loads(path.read_bytes())["files"][0]["name"] == "../x/y.pt"
