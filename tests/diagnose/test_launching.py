"""Messages of bash, srun and slurmstepd about a failed start, recorded with Slurm 22.05."""

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

import hpcrun
from hpcrun.diagnose.causes import blames_node
from hpcrun.diagnose.launching import launch_failure, setup_failure

BASH = """on node1
hello
/var/spool/slurmd/job00012/slurm_script: line 17: module: command not found
hpcrun: bad-input
"""
LMOD = """on node1
Lmod has detected the following error:  The following module(s) are unknown: "CUDA/12"

Please check the spelling or version number. Also try "module spider ..."
"""
RANK = """Traceback (most recent call last):
  File "/project/hpcrun/worker.py", line 36, in main
    from submitit.core.logger import get_logger
ModuleNotFoundError: No module named 'submitit'
"""


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (BASH, ": module: command not found"),
        (LMOD, ": Lmod has detected the following error:  The following module(s) are unknown: "
         '"CUDA/12"'),
        ("on node1\nhello from here\n", "; its log ends with: hello from here"),
        ("on node1\n", ""),
    ],
)  # fmt: skip
def test_a_failed_setup_is_reported_with_its_line_and_message(log: str, words: str) -> None:
    told = setup_failure("module load CUDA/12", log, worked=False)
    assert told.line == f"setup failed at `module load CUDA/12`{words}"
    assert told.bad_input
    # The job has worked before: the cause is the node, or temporary.
    assert not setup_failure("module load CUDA/12", log, worked=True).bad_input


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("srun: unrecognized option '--nix'\nTry \"srun --help\" for more information",
         "srun: unrecognized option '--nix'"),
        ("srun: cluster configuration lacks support for cpu binding\n"
         'srun: error: unrecognized --cpu-bind argument "bogus"\n'
         "srun: fatal: Failed to parse --cpu-bind= values.",
         'srun: unrecognized --cpu-bind argument "bogus"'),
        ("srun: fatal: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive.",
         "srun: --mem, --mem-per-cpu, and --mem-per-gpu are mutually exclusive."),
        ("srun: fatal: cpus-per-task set by two different environment variables SLURM_CPUS_PER_TASK=3 != "
         "SLURM_TRES_PER_TASK=cpu=1",
         "srun: cpus-per-task set by two different environment variables SLURM_CPUS_PER_TASK=3 != "
         "SLURM_TRES_PER_TASK=cpu=1"),
        ("srun: fatal: --gpus-per-task is mutually exclusive with --ntasks-per-gpu",
         "srun: --gpus-per-task is mutually exclusive with --ntasks-per-gpu"),
        ("srun: error: Requested het-group offset exceeds the number of components",
         "srun: Requested het-group offset exceeds the number of components"),
        ("srun: error: Unable to create step for job 7: Requested node configuration is not available",
         "srun: Unable to create step for job 7: Requested node configuration is not available"),
        ("srun: warning: can't honor --ntasks-per-node set to 2\nsrun: fatal: Invalid MPI type 'pmi9'",
         "srun: Invalid MPI type 'pmi9'"),
        ("srun: error: Invalid --time specification", "srun: Invalid --time specification"),
        ("srun: error: Unable to create step for job 23: More processors requested than permitted",
         "srun: Unable to create step for job 23: More processors requested than permitted"),
    ],
)  # fmt: skip
def test_what_srun_refuses_on_every_node_is_bad_input(said: str, line: str) -> None:
    told = launch_failure(f"on node1\n{said}\n", "", worked=False)
    assert told is not None
    assert (told.line, told.bad_input) == (line, True)
    again = launch_failure(f"on node1\n{said}\n", "", worked=True)
    # After a start that worked, a node has lost what it had.
    assert again == replace(told, bad_input="Unable to create step" not in said)


@pytest.mark.parametrize(
    ("rank", "words"),
    [
        ("slurmstepd-node1: error: execve(): apptainer: No such file or directory\n",
         "cannot be started: apptainer: No such file or directory"),
        (RANK, "no module submitit for the ranks' Python"),
        ("/usr/bin/python3: No module named hpcrun.worker\n", "no module hpcrun.worker for"),
    ],
)  # fmt: skip
def test_a_missing_program_is_named_and_may_exist_elsewhere(rank: str, words: str) -> None:
    srun = "on node1\nsrun: error: node1: task 0: Exited with exit code 2\n"
    for worked in (False, True):
        told = launch_failure(srun, rank, worked=worked)
        assert told is not None
        assert words in told.line
        assert told.bad_input is not worked


@pytest.mark.parametrize(
    "said",
    [
        "srun: error: Unable to create step for job 7: Job/step already completing or completed",
        "srun: error: Unable to create step for job 7: Requested nodes are busy",
        "srun: error: Unable to confirm allocation for job 7: Invalid job id specified",
        "srun: error: Unable to create step for job 7: Unable to contact slurm controller (connect failure)",
        "srun: fatal: Could not establish a configuration source",
        "srun: fatal: Unable to process configuration file",
        "srun: error: Invalid job credential",
        "srun: error: Task launch for StepId=7.0 failed on node n1: Socket timed out on send/recv operation",
        "srun: warning: exceeds the recommended number of tasks",
        "srun: job 7 queued and waiting for resources",
    ],
)
def test_what_may_pass_is_left_to_the_budget_for_crashes(said: str) -> None:
    assert launch_failure(f"on node1\n{said}\n", "", worked=False) is None


@pytest.mark.parametrize("words", ["srun: command not found", "/usr/bin/srun: Permission denied"])
def test_a_batch_script_without_srun_is_bad_input(words: str) -> None:
    told = launch_failure(f"on node1\nhpcrun: line 15: {words}\n", "", worked=False)
    assert told is not None
    assert told.bad_input
    assert "lacks Slurm's programs" in told.line


def test_a_removed_node_is_no_bad_input_after_work() -> None:
    gone = "srun: error: Invalid node name specified"
    told = [launch_failure(gone, "", worked=worked) for worked in (True, False)]
    assert [one.bad_input for one in told if one] == [False, True]
    assert launch_failure("", "RuntimeError: broken\n", worked=False) is None


# Since 25.05 slurmstepd's lines need not name its host.
@pytest.mark.parametrize("prefix", ["slurmstepd-node2: ", "[2026-11-22T00:47:19.950] "])
def test_a_program_that_one_node_lacks_blames_the_node(tmp_path: Path, prefix: str) -> None:
    (tmp_path / "rank-00000.log").write_text("hpcrun: 2 ranks\n")
    (tmp_path / "rank-00001.log").write_text(
        f"{prefix}error: execve(): python: Permission denied\n"
    )
    srun = "on node1\nsrun: error: node2: task 1: Exited with exit code 13\n"
    told = launch_failure(srun, "", worked=False, logs=tmp_path)
    assert told is not None
    assert told.line == (
        "the ranks on node2 cannot be started: python: Permission denied (the other ranks started)"
    )
    assert (told.host, told.bad_input, blames_node(told)) == ("node2", False, True)


def test_a_program_that_all_nodes_lack_is_no_nodes_fault(tmp_path: Path) -> None:
    words = "slurmstepd-node{}: error: execve(): python: No such file or directory\n"
    for rank in (0, 1):
        (tmp_path / f"rank-0000{rank}.log").write_text(words.format(rank + 1))
    (tmp_path / "rank-00002.log").touch()
    told = launch_failure("", words.format(1), worked=True, logs=tmp_path)
    assert told is not None
    assert (told.host, told.bad_input, blames_node(told)) == (None, False, False)


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("/usr/bin/python3: Error while finding module specification for 'hpcrun.worker' "
         "(ModuleNotFoundError: No module named 'hpcrun')\n",
         "no module hpcrun for the ranks' Python (job.python, job.image, job.container)"),
        ("/opt/python3.8: Error while finding module specification for 'hpcrun.worker' "
         "(ImportError: hpcrun needs Python 3.10 or newer, and this is 3.8 (/opt/python3.8))\n",
         "hpcrun needs Python 3.10 or newer, and this is 3.8 (/opt/python3.8) "
         "(job.python, job.image, job.container)"),
    ],
)  # fmt: skip
def test_an_interpreter_that_cannot_run_hpcrun_is_bad_input(said: str, line: str) -> None:
    told = launch_failure("", said, worked=False)
    assert told is not None
    assert told.line == line
    assert told.bad_input


def test_old_interpreters_can_read_the_check_of_their_version() -> None:
    source = Path(hpcrun.__file__).read_text()
    check, _, _ = source.partition("from importlib")
    ast.parse(source, feature_version=(3, 6))
    names = {"sys": SimpleNamespace(version_info=(3, 8), executable="/opt/python3.8")}
    lines = check.partition("import sys\n")[2]
    with pytest.raises(ImportError, match=r"this is 3\.8 \(/opt/python3\.8\)"):
        exec(lines, names)
