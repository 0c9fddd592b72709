"""The removal of a run directory after an interrupted submission."""

import os
from pathlib import Path
from typing import Any

import pytest

from hpcrun.api.submission.handover import remove


def test_a_canceled_job_that_still_writes_does_not_keep_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    late = folder / ".unstarted-12"
    real, written = os.rmdir, list[Path]()

    def rmdir(*arguments: Any, **options: Any) -> None:
        if not written:
            # The moment between the removal of the files and the removal of the folder.
            late.touch()
            written.append(late)
        real(*arguments, **options)

    monkeypatch.setattr(os, "rmdir", rmdir)
    remove(folder)
    assert written == [late]
    assert not folder.exists()
