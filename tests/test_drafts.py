"""Drafts of killed writers are removed, and those of living writers stay."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrun.drafts import draft_folder, draft_of, is_special, process_space, remove_left
from hpcrun.errors import UserError
from hpcrun.results.report.page import require_place
from hpcrun.results.store import ResultsFile
from hpcrun.run.files import write_atomic

HOST = os.uname().nodename
HERE = process_space()


def test_only_what_nobody_writes_any_more_is_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    path = tmp_path / "a.bin"
    own, random = draft_of(path), "0123456789ab"
    assert own.name.startswith(f".a.bin.{HERE}-{os.getpid()}.")
    killed = tmp_path / f".a.bin.{HERE}-{ended.pid}.{random}.tmp"
    stay = {
        own,
        tmp_path / f".a.bin.{HERE}-1.{random}.tmp",
        tmp_path / f".a.bin.other-{ended.pid}.{random}.tmp",
        # Of a container with this host name.
        tmp_path / f".a.bin.{HOST}-00000000-7-{ended.pid}.{random}.tmp",
        tmp_path / f".a.bin.{random}.tmp",
        # Drafts of other files, and no drafts.
        tmp_path / f".a.{HERE}-{ended.pid}.{random}.tmp",
        tmp_path / f".a_bin.{HERE}-{ended.pid}.{random}.tmp",
        tmp_path / f"a.bin.{HERE}-{ended.pid}.{random}.tmp",
        tmp_path / f".a.bin.{HERE}-{ended.pid}.{random}.new",
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


def test_a_container_of_this_host_has_another_process_space() -> None:
    """Two containers with one host name each have their own process 7."""
    program = "from hpcrun.drafts import process_space; print(process_space())"
    spaces = []
    for command in ([], ["unshare", "--user", "--pid", "--fork"]):
        done = subprocess.run(
            [*command, sys.executable, "-c", program], capture_output=True, text=True, check=False
        )
        if done.returncode:
            pytest.skip(f"no PID namespace here: {done.stderr.strip()}")
        spaces.append(done.stdout.strip())
    assert spaces[0] == process_space()
    assert spaces[0] != spaces[1]
    assert spaces[1].startswith(f"{HOST}-")


def test_a_folder_of_a_killed_writer_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "data"
    child = os.fork()
    if child == 0:
        with draft_folder(path):
            os.kill(os.getpid(), signal.SIGKILL)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    assert len([*tmp_path.glob(".data.*.tmp")]) == 1
    with draft_folder(path) as own:
        assert [*tmp_path.glob(".data.*")] == [own]


@pytest.mark.parametrize("through_a_link", [False, True])
def test_a_pipe_or_device_is_never_replaced(tmp_path: Path, through_a_link: bool) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    (link := tmp_path / "link").symlink_to(pipe)
    output = link if through_a_link else pipe
    for refused in (
        lambda: require_place(output),
        lambda: ResultsFile(output),
        lambda: write_atomic(pipe, "x"),
    ):
        with pytest.raises((OSError, UserError), match="is a device, a pipe or a socket"):
            refused()
    assert sorted(tmp_path.iterdir()) == [link, pipe]
    assert pipe.is_fifo()
    assert is_special(Path("/dev/null"))


@pytest.mark.parametrize("host", ["a/b", "../../x", "\udcff\n\x1b[2J", "", "é" * 64, "x" * 300])
def test_any_host_name_gives_the_name_of_a_file(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: host)
    space = process_space.__wrapped__()
    assert "/" not in space
    with monkeypatch.context() as changed:
        changed.setattr("hpcrun.drafts.process_space", lambda: space)
        with draft_folder(tmp_path / ("n" * 100)) as folder:
            assert folder.parent == tmp_path
        left = draft_of(tmp_path / "a").with_suffix(".tmp")
        left.touch()
        remove_left(tmp_path / "a")
        assert left.exists()
