"""Advice on Lustre's stripes at the first save, from recorded answers of ``lfs``."""

from pathlib import Path

import pytest

from hpcrun.storage.disk import LOCAL, FileSystem
from hpcrun.storage.lustre import (
    MAGIC,
    getstripe_command,
    parse_getstripe,
    setstripe_command,
)

from . import single_rank


class Lustre(FileSystem):
    """A file system with Lustre's type, on which a small file is large."""

    striped_from = 50_000

    def type_of(self, path: Path) -> int:
        super().type_of(path)
        return MAGIC


class Gone(Lustre):
    """A file system that answers no question about its type."""

    def type_of(self, path: Path) -> int:
        raise OSError(107, "Transport endpoint is not connected")


@pytest.fixture
def lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a program ``lfs`` on PATH, which prints the file ``answer`` and lists its calls in ``calls``."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "lfs"
    program.write_text(f'#!/bin/sh\necho "$*" >> "{folder}/calls"\n. "{folder}/answer"\n')
    program.chmod(0o755)
    (folder / "answer").write_text("echo 1\n")
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder


# Lustre 2.12 and 2.15: -c alone prints the number, per component of a progressive layout.
@pytest.mark.parametrize(
    ("printed", "count"),
    [
        ("1\n", 1),
        ("-1\n", -1),
        ("0\n", 0),
        ("16\n", 16),
        ("1\n4\n-1\n", -1),
        ("stripe_count:  1\n", 1),
        ("/scratch/run-1/checkpoints has no stripe info\n", None),
        ("/scratch/run 1\n1\n", 1),
        ("", None),
    ],
)
def test_the_stripe_count_is_read_from_the_answer(printed: str, count: int | None) -> None:
    assert parse_getstripe(printed) == count


def test_the_commands_have_the_options_of_the_manual_pages() -> None:
    folder = Path("/scratch/run/checkpoints")
    assert getstripe_command(folder) == ["lfs", "getstripe", "-d", "-c", str(folder)]
    assert setstripe_command(folder, 2_000_000_000)[:4] == ["lfs", "setstripe", "-c", "4"]
    assert setstripe_command(folder, 10_000_000_000)[:4] == ["lfs", "setstripe", "-c", "8"]


def test_the_first_save_on_lustre_gives_one_line(tmp_path: Path, lfs: Path) -> None:
    root = tmp_path / "a run" / "checkpoints"
    root.parent.mkdir()
    saving = single_rank.engine(root, "7-0", Lustre())
    first = single_rank.save(saving, 1)
    assert first.ok
    (line,) = first.notes
    assert line.startswith(f"{root}: Lustre writes each file to one OST (stripe count 1)")
    assert f" kB; `lfs setstripe -c 4 '{root}'` divides the files of later saves" in line
    assert (lfs / "calls").read_text() == f"getstripe -d -c {root}\n"
    assert single_rank.save(saving, 2).notes == ()
    assert single_rank.save(single_rank.engine(root, "7-1", Lustre()), 3).notes == ()
    assert (lfs / "calls").read_text() == f"getstripe -d -c {root}\n"


@pytest.mark.parametrize(
    ("fs", "answer"),
    [
        (Lustre(), "echo 8"),
        (Lustre(), "echo -1"),
        (Lustre(), "echo 1; exit 1"),
        (Lustre(), "printf '\\377\\n'"),
        (Lustre(), None),
        (Gone(), "echo 1"),
        (LOCAL, "echo 1"),
    ],
)
def test_no_other_answer_gives_advice_or_fails_the_save(
    tmp_path: Path, lfs: Path, fs: FileSystem, answer: str | None
) -> None:
    (lfs / "answer").write_text(answer or "")
    if answer is None:
        (lfs / "lfs").unlink()
    outcome = single_rank.save(single_rank.engine(tmp_path / "checkpoints", "7-0", fs), 1)
    assert outcome.ok
    assert outcome.notes == ()


def test_the_type_of_a_file_system_is_that_of_stat(tmp_path: Path) -> None:
    # statfs(2): PROC_SUPER_MAGIC.
    assert LOCAL.type_of(Path("/proc")) == 0x9FA0
    with pytest.raises(FileNotFoundError):
        LOCAL.type_of(tmp_path / "missing")
