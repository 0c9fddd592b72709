"""Options of a submission: each is a key of the schema, and nothing else names it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import hpcrun

FIELD = """
    nice: Annotated[Count | None, SubmitOption("N", sbatch="nice")] = Field(
        default=None, description="Adjustment of the priority."
    )
    mem: """


def test_a_new_field_is_option_argument_and_sbatch_line(tmp_path: Path) -> None:
    shutil.copytree(Path(hpcrun.__file__).parent, tmp_path / "hpcrun")
    schema = tmp_path / "hpcrun" / "config" / "schema.py"
    text = schema.read_text()
    assert text.count("\n    mem: ") == 1
    schema.write_text(text.replace("\n    mem: ", FIELD))

    def told(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, *words],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": str(tmp_path), "PYTHONSAFEPATH": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        return done.stdout + done.stderr

    assert "--nice N              adjustment of the priority\n" in told(
        "-m", "hpcrun", "submit", "--help"
    )
    shown = told("-m", "hpcrun", "submit", "--dry-run", "--executor", "slurm", "--nice", "5")
    assert "\n#SBATCH --nice=5\n" in shown
    assert "\n  nice: 5\n" in shown
    assert "nice=: job.nice: should be at least 1, not 0" in told(
        "-c", "import hpcrun; hpcrun.submit(nice=0)"
    )


def test_an_unknown_argument_suggests_the_nearest_option() -> None:
    with pytest.raises(TypeError, match="'partitions'; did you mean partition"):
        hpcrun.submit(partitions="long")
