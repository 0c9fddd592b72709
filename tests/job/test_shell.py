"""The shell that runs the set-up and the steps of a job."""

import os
from pathlib import Path

from hpcrun.job.step import run_ranks


def test_no_process_shows_values_of_the_environment_as_arguments(tmp_path: Path) -> None:
    seen = tmp_path / "arguments"
    look = f'cat /proc/$PPID/cmdline /proc/self/cmdline > {seen}; printf %s "$TOKEN" > {seen}.token'
    ended = run_ranks([], {"TOKEN": "secret-7"}, [["sh", "-c", look]], os.environ)
    assert ended.code == 0
    assert (tmp_path / "arguments.token").read_text() == "secret-7"
    assert "printf" in seen.read_text()
    assert "secret-7" not in seen.read_text()
