"""Drafts of killed writers are removed, and those of living writers stay."""

import os
import subprocess
import sys
import time
from pathlib import Path

from hpcrun.drafts import draft_of, remove_left

HOST = os.uname().nodename


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = tmp_path / "a.bin"
    own, random = draft_of(path), "0123456789ab"
    assert own.name.startswith(f".a.bin.{HOST}-{os.getpid()}.")
    killed = tmp_path / f".a.bin.{HOST}-{ended.pid}.{random}.tmp"
    stay = {
        own,
        tmp_path / f".a.bin.{HOST}-1.{random}.tmp",
        tmp_path / f".a.bin.other-{ended.pid}.{random}.tmp",
        tmp_path / f".a.bin.{random}.tmp",
        # Drafts of other files, and no drafts.
        tmp_path / f".a.{HOST}-{ended.pid}.{random}.tmp",
        tmp_path / f".a_bin.{HOST}-{ended.pid}.{random}.tmp",
        tmp_path / f"a.bin.{HOST}-{ended.pid}.{random}.tmp",
        tmp_path / f".a.bin.{HOST}-{ended.pid}.{random}.new",
    }
    for file in (*stay, killed):
        file.write_text("x")
    old = time.time() - 900
    os.utime(own, (old, old))
    folder = tmp_path / f".a.bin.an-other.host-7.{random}.tmp"
    folder.mkdir()
    (folder / "shard").write_text("x")
    os.utime(folder, (old, old))
    # A file in the folder has changed since.
    remove_left(path, patience=600)
    assert {*tmp_path.iterdir()} == stay | {folder}
    for left in (folder / "shard", folder, tmp_path / f".a.bin.{random}.tmp"):
        os.utime(left, (old, old))
    remove_left(path, patience=600)
    assert {*tmp_path.iterdir()} == stay - {tmp_path / f".a.bin.{random}.tmp"}
    remove_left(tmp_path / "missing" / "a.bin", patience=600)
