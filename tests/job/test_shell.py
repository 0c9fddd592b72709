"""The shell that runs the set-up and the steps of a job."""

import os
from pathlib import Path

import pytest

from hpcrun.job.step import run_ranks


def test_no_process_shows_values_of_the_environment_as_arguments(tmp_path: Path) -> None:
    seen = tmp_path / "arguments"
    look = f'cat /proc/$PPID/cmdline /proc/self/cmdline > {seen}; printf %s "$TOKEN" > {seen}.token'
    ended = run_ranks([], {"TOKEN": "secret-7"}, [["sh", "-c", look]], os.environ)
    assert ended.code == 0
    assert (tmp_path / "arguments.token").read_text() == "secret-7"
    assert "printf" in seen.read_text()
    assert "secret-7" not in seen.read_text()


@pytest.mark.parametrize(
    "line",
    ["export PATH=/nowhere", "unset PATH", "PATH=", 'export PATH="$OLDER:/usr/bin:/bin"'],
)
def test_a_set_up_does_not_hide_or_replace_srun(tmp_path: Path, line: str) -> None:
    slurm, older = tmp_path / "its slurm", tmp_path / "older"
    for folder, words in ((slurm, "$*"), (older, "wrong")):
        folder.mkdir()
        program = folder / "srun"
        program.write_text(f'#!/bin/bash\necho "{words}; $(type -P srun)" > {tmp_path}/called\n')
        program.chmod(0o755)
    environ = {"PATH": f"{slurm}:/usr/bin:/bin", "OLDER": str(older)}
    assert run_ranks([line], {}, [["srun", "--ntasks=2"]], environ).code == 0
    found = older if "OLDER" in line else slurm
    # What the set-up starts on purpose stays, such as a program that calls srun.
    assert (tmp_path / "called").read_text() == f"--ntasks=2; {found}/srun\n"
