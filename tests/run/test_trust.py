"""What a job trusts: a run directory, a config and a copy of the code of its own user only."""

import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.config import Config
from hpcrun.run.directory import RunDirectory, create, shows_owners
from hpcrun.run.files import HeldFolder, digest_of
from hpcrun.run.snapshot import Snapshot
from hpcrun.run.trust import (
    ForeignRun,
    fixed_script,
    own_config,
    own_json,
    replaceable,
    require_own_code,
    shared_parent_line,
)
from hpcrun.slurm.launch.batch_script import batch_request, batch_script

OTHER = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Return a run in a folder in which everybody may rename it, as in a project folder."""
    made = create(tmp_path / "shared" / "a", "seed: 1\n", {"created": 1.0})
    made.path.parent.chmod(0o777)
    return made


def foreign_folder(run: RunDirectory) -> None:
    os.chown(run.path, OTHER, -1)


def foreign_config(run: RunDirectory) -> None:
    os.chown(run.config, OTHER, -1)


def link_to_a_foreign_folder(run: RunDirectory) -> None:
    away = run.path.rename(run.path.with_name("b"))
    os.chown(away, OTHER, -1)
    run.path.symlink_to(away)


def link_to_a_foreign_config(run: RunDirectory) -> None:
    foreign_config(run)
    run.config.rename(run.path.parent / "c.yaml")
    run.config.symlink_to(run.path.parent / "c.yaml")


def fifo_of_another_user(run: RunDirectory) -> None:
    run.config.unlink()
    os.mkfifo(run.config)
    foreign_config(run)


@as_root
@pytest.mark.parametrize(
    "replace",
    [
        foreign_folder,
        foreign_config,
        link_to_a_foreign_folder,
        link_to_a_foreign_config,
        fifo_of_another_user,
    ],
)
def test_a_run_of_another_user_is_refused(
    run: RunDirectory, replace: Callable[[RunDirectory], None]
) -> None:
    submitted = digest_of(own_config(run))
    replace(run)
    for digest in (None, submitted):
        with pytest.raises(ForeignRun, match="belongs to nobody"):
            own_config(run, digest)


@as_root
def test_a_mount_that_shows_one_owner_leaves_the_hash(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted = digest_of(own_config(run))
    assert shows_owners(run.path)
    # As if this user had another number, and the mount showed all files as root's.
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    assert own_config(run, submitted).startswith(b"seed: 1\n")
    assert own_json(run.record) is not None
    assert not shows_owners(run.path)
    assert "-O" not in batch_script(batch_request(run, Config()))
    run.config.write_text("seed: 2\n")
    with pytest.raises(ForeignRun, match="not the config that was submitted"):
        own_config(run, submitted)
    foreign_folder(run)
    with pytest.raises(ForeignRun, match="belongs to nobody"):
        own_config(run, submitted)


def test_another_run_of_the_user_in_its_place_is_refused(run: RunDirectory) -> None:
    submitted = digest_of(own_config(run, digest_of(b"seed: 1\n" + run.config.read_bytes()[8:])))
    other = create(run.path.with_name("b"), "seed: 2\n", {})
    run.path.rename(run.path.with_name("away"))
    other.path.rename(run.path)
    with pytest.raises(ForeignRun, match=r"not the config that was submitted.*hpcrun resume"):
        own_config(run, submitted)
    # A script of an earlier version has no digest.
    assert own_config(run).startswith(b"seed: 2\n")


def test_an_edited_config_counts_where_nobody_else_can_rename(run: RunDirectory) -> None:
    submitted = digest_of(own_config(run))
    run.config.write_text("seed: 3\n")
    with pytest.raises(ForeignRun):
        own_config(run, submitted)
    run.path.parent.chmod(0o1777)
    assert own_config(run, submitted) == b"seed: 3\n"


@pytest.mark.parametrize(
    ("mode", "group", "found"),
    [
        (0o755, OTHER, False),
        (0o777, 0, True),
        (0o2770, OTHER, True),
        (0o1777, OTHER, False),
        (0o3770, OTHER, False),
        # The group of root, and that of one user only.
        (0o2770, 0, False),
    ],
)
@as_root
def test_shared_folders_are_those_in_which_others_rename(
    run: RunDirectory, mode: int, group: int, found: bool
) -> None:
    shared = run.path.parent
    os.chown(shared, -1, group)
    shared.chmod(mode)
    assert replaceable(run.path) == (shared if found else None)
    # A link elsewhere does not hide the folder.
    (link := shared.parent / "link").symlink_to(run.path)
    assert replaceable(link) == (shared if found else None)
    line = shared_parent_line(run.path)
    assert bool(line) == found
    assert not line or f"chmod +t {shared}" in line
    create(run.path.with_name("b"), "", {})
    assert shared_parent_line(run.path) is None


@as_root
@pytest.mark.parametrize("place", ["code/001", "code/001/a.py", "code/001/pkg", "code/001/link"])
def test_a_copy_with_files_of_another_user_is_refused(run: RunDirectory, place: str) -> None:
    root = run.code / "001"
    (root / "pkg").mkdir(parents=True)
    (root / "a.py").touch()
    (root / "link").symlink_to("a.py")
    snapshot = Snapshot(root, Path("/x"))
    root.chmod(0o770)
    require_own_code(snapshot)
    os.chown(run.path / place, OTHER, -1, follow_symlinks=False)
    with pytest.raises(ForeignRun, match=f"{place}: belongs to nobody"):
        require_own_code(snapshot)


@as_root
def test_a_copy_by_another_user_is_another_folder(run: RunDirectory) -> None:
    held, away = HeldFolder(run.path), run.path.with_name("away")
    record = run.record.read_bytes()
    run.path.rename(away)
    run.path.mkdir()
    run.record.write_bytes(record)
    assert held.is_there()
    os.chown(run.path, OTHER, -1)
    assert not held.is_there()


def test_sbatch_reads_a_script_that_nobody_can_replace(run: RunDirectory) -> None:
    script = run.path.parent / "batch.sbatch"
    script.write_text("old")
    path, kept = fixed_script(script, b"submitted")
    assert kept is not None
    with kept:
        script.write_text("of another user")
        assert path.read_bytes() == b"submitted"
    run.path.parent.chmod(0o755)
    assert fixed_script(script, b"submitted") == (script, None)


@as_root
def test_a_request_of_another_user_is_refused(run: RunDirectory) -> None:
    path = run.path / "request.json"
    assert own_json(path) is None
    path.write_text('{"a": 1}')
    assert own_json(path) == {"a": 1}
    os.chown(path, OTHER, -1)
    with pytest.raises(ForeignRun):
        own_json(path)
    assert stat.S_IMODE(run.path.stat().st_mode) == 0o700
