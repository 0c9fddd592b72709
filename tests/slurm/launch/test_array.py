"""Job arrays of a sweep: names, indices, several arrays above MaxArraySize, and the batch script."""

import os
import subprocess
from pathlib import Path

import pytest

from hpcrun.api.sweeps.plan import groups
from hpcrun.config import Job
from hpcrun.errors import LaunchError
from hpcrun.slurm.launch.array import ArrayTasks, arrays, element_name
from hpcrun.slurm.launch.batch_script import BatchRequest, batch_script


@pytest.mark.parametrize("largest", [10, 11, 100, 101, 999, 1000, 1001, 4096, 10001, 100001])
def test_every_element_is_in_one_array_under_its_name(largest: int) -> None:
    numbers = [*range(0, 2300, 7), 9_999, 12_345]
    found = arrays(numbers, largest)
    assert sorted(name for one in found for name in one.names) == sorted(map(element_name, numbers))
    assert all(0 <= index < largest for one in found for index in one.indices)
    assert all(len(set(one.indices)) == len(one.indices) for one in found)


def test_a_sweep_of_a_thousand_is_one_array_by_default() -> None:
    (only,) = arrays(range(1000), 1001)
    assert only.option == "0-999"
    assert arrays(range(1001), 1001)[1] == ArrayTasks("1", 3, [0])


def test_the_option_has_spans_and_the_limit() -> None:
    assert ArrayTasks("", 3, [0, 1, 2, 5, 7, 8], 4).option == "0-2,5,7-8%4"


def test_a_cluster_without_arrays_is_refused() -> None:
    with pytest.raises(LaunchError, match="MaxArraySize of this cluster is 1"):
        arrays([0], 1)


@pytest.mark.parametrize(
    ("prefix", "width", "name"), [("", 3, "007"), ("1", 3, "1007"), ("0", 2, "007")]
)
def test_the_script_finds_the_run_directory_of_its_task(
    tmp_path: Path, prefix: str, width: int, name: str
) -> None:
    folder = tmp_path / "a sweep"
    (folder / name).mkdir(parents=True)
    array = ArrayTasks(prefix, width, [7], 2)
    text = batch_script(BatchRequest(folder, Job(), "/bin/echo", array))
    assert "#SBATCH --array=7%2\n" in text
    assert f"{prefix}%{width}a/logs/batch-%A_%a.log" in text
    # The interpreter is echo: it prints the arguments, and removes no file of tries.
    lines = text.replace("sleep $pause", "break")
    done = subprocess.run(
        ["bash", "-c", lines.replace("scontrol", "echo scontrol")],
        env={
            "SLURM_ARRAY_JOB_ID": "12",
            "SLURM_ARRAY_TASK_ID": "7",
            "SLURM_JOB_ID": "19",
            "PATH": "/bin",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == f"-m hpcrun batch {folder}/{name}\n"
    assert (folder / name / ".unstarted-19").exists()


def test_a_requeue_by_the_script_names_the_task_and_not_the_array() -> None:
    text = batch_script(BatchRequest(Path("/r/s"), Job(), "python", ArrayTasks("", 3, [0, 1])))
    assert text.count('"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"') == 2
    assert 'show job "$SLURM_JOB_ID"' not in text


def test_packed_elements_share_the_task_of_the_first_of_them(tmp_path: Path) -> None:
    (one,) = arrays([0, 2, 3, 5, 7], 1001, at_once=2, pack=2)
    assert one.option == "0,3,7%2"
    assert one.elements == [("000", 0), ("002", 0), ("003", 3), ("005", 3), ("007", 7)]
    first, second = arrays([998, 999, 1000, 1001], 1001, pack=3)
    assert (first.tasks, second.tasks) == ([(998, ["998", "999", "1000"])], [(1, ["1001"])])
    # The script names the runs of its task.
    script = batch_script(BatchRequest(tmp_path / "a b", Job(), "/bin/echo", one))
    for index, names in ((0, "000 002"), (7, "007")):
        done = subprocess.run(
            ["bash", "-c", script.replace("sleep", "true")],
            env={
                "SLURM_ARRAY_TASK_ID": str(index),
                "SLURM_JOB_ID": "1",
                "PATH": os.environ["PATH"],
            },
            capture_output=True,
            text=True,
        )
        folders = " ".join(f"{tmp_path}/a b/{name}" for name in names.split())
        assert done.stdout.splitlines()[0] == f"-m hpcrun batch --pack {folders}"


@pytest.mark.parametrize(
    ("numbers", "at_once", "sizes"),
    [
        ([0, 1, 2, 3], None, [([0, 1, 2, 3], 2)]),
        ([4], None, [([4], 1)]),
        ([4, 2, 9, 5, 7], None, [([2, 4, 5, 7], 2), ([9], 1)]),
        # A second array would wait for the end of the first.
        ([4, 2, 9], 2, [([2, 4, 9], 2)]),
    ],
)
def test_a_job_asks_for_the_runs_that_it_has(
    numbers: list[int], at_once: int | None, sizes: list[tuple[list[int], int]]
) -> None:
    assert groups(numbers, 2, at_once) == sizes
