"""The undo of a submission that fails or is interrupted."""

import os
import resource
from pathlib import Path
from typing import Any

import pytest

from hpcrun.api.submission.undo import put_back_on_failure, remove
from hpcrun.run.files import write_atomic


@pytest.mark.parametrize("taken", [False, True])
def test_a_canceled_job_that_still_writes_frees_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    place = os.open(folder, os.O_RDONLY)
    real, written = os.rmdir, list[str]()

    def rmdir(*arguments: Any, **options: Any) -> None:
        if not written:
            # The moment between the removal of the files and the removal of the folder.
            written.append(".unstarted-12")
            os.close(os.open(written[0], os.O_CREAT | os.O_WRONLY, dir_fd=place))
            if taken:
                # Another submission has the name now.
                if folder.exists():
                    folder.rename(tmp_path / "away")
                folder.mkdir()
                (folder / "run.json").touch()
        real(*arguments, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    remove(folder)
    os.close(place)
    assert written
    assert [path.name for path in tmp_path.iterdir()] == (["run"] if taken else [])
    assert not taken or (folder / "run.json").exists()


def test_a_full_disk_gives_files_their_content_back(tmp_path: Path) -> None:
    old, new = tmp_path / "run.json", tmp_path / "result.json"
    write_atomic(old, "before")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill() -> None:
        with put_back_on_failure(old, new):
            write_atomic(old, "after")
            write_atomic(new, "after")
            # From here on no byte can be written, as on a full disk.
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
            write_atomic(tmp_path / "config.yaml", "after")

    try:
        with pytest.raises(OSError, match="File too large"):
            fill()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert old.read_text() == "before"
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]
