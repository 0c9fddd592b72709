"""Job arrays of a sweep: names, indices, and the batch script."""

import subprocess
from pathlib import Path

import pytest

from hpcrun.config import Job
from hpcrun.slurm.launch.batch_script import ArrayTasks, BatchRequest, batch_script


def test_a_sweep_is_one_array_with_spans_and_a_limit() -> None:
    assert ArrayTasks(range(1000)).option == "0-999"
    assert ArrayTasks([0, 1, 2, 5, 7, 8], 4).option == "0-2,5,7-8%4"


@pytest.mark.parametrize(("number", "name"), [(7, "007"), (1007, "1007")])
def test_the_script_finds_the_run_directory_of_its_task(
    tmp_path: Path, number: int, name: str
) -> None:
    folder = tmp_path / "a sweep"
    (folder / name).mkdir(parents=True)
    array = ArrayTasks([number], 2)
    text = batch_script(BatchRequest(folder, Job(), "/bin/echo", array))
    assert f"#SBATCH --array={number}%2\n" in text
    assert "%3a/logs/batch-%A_%a.log" in text
    # The interpreter is echo: it prints the arguments, and removes no file of tries.
    lines = text.replace("sleep $pause", "break")
    done = subprocess.run(
        ["bash", "-c", lines.replace("scontrol", "echo scontrol")],
        env={
            "SLURM_ARRAY_JOB_ID": "12",
            "SLURM_ARRAY_TASK_ID": str(number),
            "SLURM_JOB_ID": "19",
            "PATH": "/bin",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"-m hpcrun batch {folder}/{name}\n"
    assert (folder / name / ".unstarted-19").exists()


def test_a_requeue_by_the_script_names_the_task() -> None:
    text = batch_script(BatchRequest(Path("/r/s"), Job(), "python", ArrayTasks([0, 1])))
    assert text.count('"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"') == 2
    assert 'show job "$SLURM_JOB_ID"' not in text


def test_each_task_checks_the_config_of_its_run(tmp_path: Path) -> None:
    (tmp_path / "005").mkdir()
    array = ArrayTasks([0, 1, 2, 3, 5], None, [f"{one}f" for one in range(5)])
    text = batch_script(BatchRequest(tmp_path, Job(), "/bin/echo", array))
    done = subprocess.run(
        ["bash", "-c", text.replace("sleep $pause", "exit")],
        env={"SLURM_ARRAY_TASK_ID": "5", "SLURM_JOB_ID": "19", "PATH": "/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"-m hpcrun batch {tmp_path}/005 --submitted=4f\n"
