"""Options of a person's own batch script that undo restarts are found at the start of the job."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from hpcrun.folders import shipped
from hpcrun.slurm.own_script import restart_problems, script_text

MODE, AGAIN, RANKS = "--open-mode=append", "--requeue", "--signal=USR2@90"


@pytest.mark.parametrize(
    ("text", "environ", "remedies"),
    [
        ("#SBATCH --signal=B:USR1@60\n", {}, [RANKS]),
        ("#SBATCH --signal=USR2@90\n#SBATCH --sig RB:TERM@60\n", {}, [RANKS]),
        ("#SBATCH --signal=USR2@90\n", {"SBATCH_SIGNAL": "B:USR2@30"}, [RANKS]),
        ("#SBATCH --no-requeue --open-mode=truncate", {}, [MODE, AGAIN]),
        ("#SBATCH --open-mode t\n", {}, [MODE]),
        ("", {"SBATCH_NO_REQUEUE": "1"}, [AGAIN]),
        ("#SBATCH --signal=B:USR1@60\n", {"SBATCH_SIGNAL": "USR2@60"}, []),
        ("#SBATCH --signal=R:USR2@60 --nodes=2 --time=5\n", {}, []),
        ("echo '#SBATCH --no-requeue'\n", {}, []),
    ],
)
def test_an_option_without_restarts_gets_a_line(
    text: str, environ: dict[str, str], remedies: list[str]
) -> None:
    lines = restart_problems(text, environ)
    assert [line.partition("write #SBATCH ")[2] for line in lines] == remedies


def test_the_shipped_scripts_are_sound() -> None:
    scripts = [*shipped("sbatch").glob("train*.sbatch")]
    assert len(scripts) == 2
    for script in scripts:
        assert restart_problems(script.read_text(), {}) == []


def test_the_script_of_a_shell_is_read(tmp_path: Path) -> None:
    script = tmp_path / "run.sbatch"
    script.write_text("#SBATCH --no-requeue\necho begun\nread -r\n")
    words = ["bash", str(script), "run"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as shell:
        assert shell.stdout is not None
        assert shell.stdout.readline() == b"begun\n"
        assert script_text(shell.pid) == script.read_text()
        shell.communicate(b"\n")
    assert script_text(2**22 + 1) == ""
