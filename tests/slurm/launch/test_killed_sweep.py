"""A submission of a sweep that is killed (SIGKILL) at any step: each element gets one job."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch import jobs as run_jobs
from tests.support import jobs

# Runs the command, and kills it at the call CALL of the function NAME.
KILLED = """
import os, signal, sys
from importlib import import_module
module, name, call = sys.argv[1:4]
place, calls = import_module(module), [0]
real = getattr(place, name)
def killed(*arguments, **named):
    calls[0] += 1
    if calls[0] == int(call):
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*arguments, **named)
setattr(place, name, killed)
from hpcrun.cli.main import main
sys.exit(main(sys.argv[4:]))
"""
# Accepts arrays, or kills the submission before where the file `kill-before` says so.
SBATCH = """#!/bin/bash
script=$(realpath "${@: -1}")
[ -e "$PLACE/kill-before" ] && { rm "$PLACE/kill-before"; kill -KILL "$SUBMITTER"; exit 1; }
number=$(($(cat "$PLACE/jobs" 2>/dev/null | wc -l) + 1))
[ -e "$PLACE/refuse" ] && { echo "sbatch: error: no such partition" >&2; exit 1; }
echo "$number|$script" >> "$PLACE/jobs"
echo "Submitted batch job $number"
"""
SQUEUE = """#!/bin/bash
jobs="${*##*--jobs=}"
for job in ${jobs//,/ }; do
    for task in 0 1 2 3; do echo "${job}_$task|PENDING||N/A,N/A|1:00|Priority|s"; done
done
"""
SUBMISSION = "hpcrun.api.submission"
SHAPE = ("--name", "s", "--nodes", "1", "--cpu", "--no-snapshot")
ELEMENT = 'import sys; open("ran", "a").write(sys.argv[1] + "\\n")'
AXES = ("--sweep", "seed=0:4", "--", sys.executable, "-c", ELEMENT, "{seed}")


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs of a Slurm that accepts jobs and starts none; the folder holds its jobs."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name, text in {
        "sbatch": SBATCH,
        "squeue": SQUEUE,
        **dict.fromkeys(("scontrol", "sacct", "sinfo", "scancel"), "#!/bin/bash\nexit 1\n"),
    }.items():
        (programs / name).write_text(text)
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.setenv("PLACE", str(programs))
    return programs


def submit_killed(folder: Path, executor: str, module: str, name: str, call: int = 1) -> None:
    """Submit, and be killed at a call of a function."""
    words = ["submit", *SHAPE, "--executor", executor, *AXES]
    done = subprocess.run(
        [sys.executable, "-c", KILLED, module, name, str(call), *words],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def submit_killed_by_sbatch(folder: Path, *more: str) -> None:
    """Submit, and be killed by the sbatch that the submission has started."""
    words = ["submit", *SHAPE, "--executor", "slurm", *more, *AXES]
    done = subprocess.run(
        [
            "bash",
            "-c",
            'export SUBMITTER=$$; exec "$@"',
            "bash",
            sys.executable,
            "-m",
            "hpcrun",
            *words,
        ],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


def hpcrun(folder: Path, *words: str) -> str:
    done = jobs.hpcrun(*words, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(folder: Path) -> list[tuple[str, str | None]]:
    lines = hpcrun(folder, "status", "--json", "s").splitlines()
    rows = [json.loads(line) for line in lines]
    return [(row["state"], row["job"]) for row in rows]


def submissions(slurm: Path) -> int:
    path = slurm / "jobs"
    return len(path.read_text().splitlines()) if path.exists() else 0


PENDING = [("pending", f"1_{number}") for number in range(4)]


LINE = ("submit", *SHAPE, "--executor", "slurm", *AXES)


def refused(folder: Path, *words: str) -> str:
    """Run a command that refuses with one line, and return the line."""
    done = jobs.hpcrun(*words, cwd=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    return done.stderr


@pytest.mark.parametrize(
    "module",
    [
        "sbatch",
        pytest.param("folder", marks=pytest.mark.slow),
        pytest.param("record", marks=pytest.mark.slow),
    ],
)
def test_a_kill_before_sbatch_leaves_everything_to_the_same_line(
    tmp_path: Path, slurm: Path, module: str
) -> None:
    if module == "sbatch":
        (slurm / "kill-before").touch()
        submit_killed_by_sbatch(tmp_path)
    else:
        name = {"folder": "sync_directory", "record": "hashed_json"}[module]
        submit_killed(tmp_path, "slurm", f"{SUBMISSION}.run_directories", name)
    assert submissions(slurm) == 0
    assert shown(tmp_path) == [("new", None)] * 4
    assert "4 runs submitted" in hpcrun(tmp_path, *LINE)
    assert submissions(slurm) == 1
    assert shown(tmp_path) == PENDING


@pytest.mark.parametrize(
    ("module", "name", "call"),
    [
        ("sending", "Journal", 3),
        pytest.param("handover", "record", 1, marks=pytest.mark.slow),
        pytest.param("sending", "sync_file_system", 1, marks=pytest.mark.slow),
    ],
)
def test_a_local_sweep_whose_submission_was_killed_begins_no_run(
    tmp_path: Path, module: str, name: str, call: int
) -> None:
    submit_killed(tmp_path, "local", f"{SUBMISSION}.{module}", name, call)
    folder = tmp_path / "runs" / "s"
    # The queue notices that the submission has ended.
    jobs.wait_for(lambda: {state for state, _ in shown(tmp_path)} <= {"new", "cancelled"})
    assert "4 runs submitted" in hpcrun(tmp_path, "submit", *SHAPE, "--executor", "local", *AXES)
    runs = [RunDirectory(folder / f"{number:03d}") for number in range(4)]
    jobs.wait_for(lambda: all(run_jobs.state(run).word == "finished" for run in runs))
    # Each element has run once.
    assert sorted((tmp_path / "ran").read_text().split()) == ["0", "1", "2", "3"]


def test_a_refused_sweep_can_be_submitted_at_once_again(tmp_path: Path, slurm: Path) -> None:
    (slurm / "refuse").touch()
    assert "sbatch refused: no such partition" in refused(tmp_path, *LINE)
    assert not (tmp_path / "runs").exists()
    (slurm / "refuse").unlink()
    hpcrun(tmp_path, *LINE)
    assert shown(tmp_path) == PENDING
