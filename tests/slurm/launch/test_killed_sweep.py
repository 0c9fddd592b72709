"""A submission of a sweep that is killed (SIGKILL) at any step: each element gets one job."""

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.sweep_file import read_sweep, write_sweep
from hpcrun.slurm.launch import jobs as run_jobs
from tests import jobs

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
# Accepts arrays, and kills the submission where the file `kill` says so, before or after.
SBATCH = """#!/bin/bash
script=$(realpath "${@: -1}")
[ -e "$PLACE/kill-before" ] && { rm "$PLACE/kill-before"; kill -KILL "$SUBMITTER"; exit 1; }
number=$(($(cat "$PLACE/jobs" 2>/dev/null | wc -l) + 1))
[ -e "$PLACE/lost" ] || echo "$number|$script" >> "$PLACE/jobs"
if [ -e "$PLACE/lost" ] || [ -e "$PLACE/late" ]; then
    rm -f "$PLACE/lost" "$PLACE/late"
    echo "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation" >&2
    exit 1
fi
[ -e "$PLACE/kill-after-$number" ] && { rm "$PLACE/kill-after-$number"; kill -KILL "$SUBMITTER"; }
echo "Submitted batch job $number"
"""
SQUEUE = """#!/bin/bash
echo "$*" >> "$PLACE/questions"
[ -e "$PLACE/silent" ] && { echo "squeue: error: no controller" >&2; exit 1; }
case "$*" in
*%F*) cat "$PLACE/jobs" 2>/dev/null; exit 0 ;;
esac
jobs="${*##*--jobs=}"
for job in ${jobs//,/ }; do
    for task in 0 1 2 3; do echo "${job}_$task|PENDING||N/A,N/A|1:00|Priority|s"; done
done
"""
HANDOVER = "hpcrun.api.sweeps.handover"
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


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("append_line", 3),
        pytest.param("_record", 1, marks=pytest.mark.slow),
        pytest.param("write_sweep", 1, marks=pytest.mark.slow),
    ],
)
def test_an_array_whose_record_was_killed_is_found_and_not_submitted_again(
    tmp_path: Path, slurm: Path, name: str, call: int
) -> None:
    submit_killed(tmp_path, "slurm", HANDOVER, name, call)
    assert submissions(slurm) == 1
    assert shown(tmp_path) == PENDING
    again = hpcrun(tmp_path, "submit", *SHAPE, "--executor", "slurm", *AXES)
    assert "nothing to submit" in again
    assert submissions(slurm) == 1


def test_the_same_line_or_a_resume_right_after_the_kill_finds_the_array(
    tmp_path: Path, slurm: Path
) -> None:
    (slurm / "kill-after-1").touch()
    submit_killed_by_sbatch(tmp_path)
    # Without Slurm's answer nothing is submitted.
    (slurm / "silent").touch()
    line = ("submit", *SHAPE, "--executor", "slurm", *AXES)
    silent = jobs.hpcrun(*line, cwd=tmp_path)
    assert (silent.returncode, silent.stderr.count("\n")) == (2, 1), silent.stderr
    assert "the previous submission was killed" in silent.stderr
    (slurm / "silent").unlink()
    resumed = jobs.hpcrun("resume", "s/002", cwd=tmp_path)
    assert "job 1_2 has it already (pending)" in resumed.stderr
    assert "nothing to submit" in hpcrun(tmp_path, *line)
    assert submissions(slurm) == 1


@pytest.mark.parametrize(
    "module",
    [
        "sbatch",
        pytest.param("folder", marks=pytest.mark.slow),
        pytest.param("elements", marks=pytest.mark.slow),
    ],
)
def test_a_kill_before_sbatch_leaves_everything_to_the_same_line(
    tmp_path: Path, slurm: Path, module: str
) -> None:
    if module == "sbatch":
        (slurm / "kill-before").touch()
        submit_killed_by_sbatch(tmp_path)
    else:
        name = {"folder": "sync_directory", "elements": "identity_of"}[module]
        place = HANDOVER if module == "elements" else "hpcrun.api.sweeps.folder"
        submit_killed(tmp_path, "slurm", place, name)
    assert submissions(slurm) == 0
    assert shown(tmp_path) == [("new", None)] * 4
    assert "4 runs submitted" in hpcrun(tmp_path, "submit", *SHAPE, "--executor", "slurm", *AXES)
    assert submissions(slurm) == 1
    assert shown(tmp_path) == PENDING
    sweep = read_sweep(tmp_path / "runs" / "s")
    assert sweep is not None
    assert [(one.jobs, len(one.elements)) for one in sweep.submissions] == [(["1"], 4)]


def test_a_kill_between_two_arrays_leaves_the_second_to_the_same_line(
    tmp_path: Path, slurm: Path
) -> None:
    (slurm / "kill-after-1").touch()
    sections = ("--sweep", "job.gpus=1,2")
    submit_killed_by_sbatch(tmp_path, *sections)
    assert [state for state, _ in shown(tmp_path)] == [*["pending"] * 4, *["new"] * 4]
    told = hpcrun(tmp_path, "submit", *SHAPE, "--executor", "slurm", *sections, *AXES)
    assert "4 runs submitted; 4 left as they are" in told
    assert submissions(slurm) == 2


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("append_line", 3),
        pytest.param("_record", 1, marks=pytest.mark.slow),
        pytest.param("sync_file_system", 1, marks=pytest.mark.slow),
    ],
)
def test_a_local_sweep_whose_submission_was_killed_begins_no_run(
    tmp_path: Path, name: str, call: int
) -> None:
    submit_killed(tmp_path, "local", HANDOVER, name, call)
    folder = tmp_path / "runs" / "s"
    states = folder.glob("*/logs/*/job.json")
    jobs.wait_for(lambda: all(json.loads(p.read_text())["state"] == "CANCELLED" for p in states))
    assert {state for state, _ in shown(tmp_path)} <= {"new", "cancelled"}
    assert "4 runs submitted" in hpcrun(tmp_path, "submit", *SHAPE, "--executor", "local", *AXES)
    runs = [RunDirectory(folder / f"{number:03d}") for number in range(4)]
    jobs.wait_for(lambda: all(run_jobs.state(run).word == "finished" for run in runs))
    # Each element has run once.
    assert sorted((tmp_path / "ran").read_text().split()) == ["0", "1", "2", "3"]


@pytest.mark.slow
def test_a_packed_array_is_recorded_with_its_packs(tmp_path: Path, slurm: Path) -> None:
    (slurm / "kill-after-1").touch()
    submit_killed_by_sbatch(tmp_path, "--pack", "2")
    assert shown(tmp_path) == [("pending", f"1_{number}") for number in (0, 0, 2, 2)]
    runs = [RunDirectory(tmp_path / "runs" / "s" / f"{number:03d}") for number in range(4)]
    (first,) = {len(jobs.events(run, "submitted")) for run in runs}
    assert first == 1
    assert {jobs.events(run, "submitted")[0].fields["pack"] for run in runs} == {2}
    # The scancel of this Slurm fails: no run may be recorded as cancelled.
    assert jobs.hpcrun("cancel", "--no-wait", "s", cwd=tmp_path).returncode == 1
    assert not [event for run in runs for event in jobs.events(run, "cancelled")]


@pytest.mark.parametrize("arrived", [True, False])
def test_an_array_whose_sbatch_had_no_answer_is_found_or_submitted_again(
    tmp_path: Path, slurm: Path, arrived: bool
) -> None:
    (slurm / ("late" if arrived else "lost")).touch()
    line = ("submit", *SHAPE, "--executor", "slurm", *AXES)
    silent = jobs.hpcrun(*line, cwd=tmp_path)
    assert (silent.returncode, silent.stderr.count("\n")) == (2, 1), silent.stderr
    assert "sbatch got no answer" in silent.stderr
    if arrived:
        assert shown(tmp_path) == PENDING
        assert "nothing to submit" in hpcrun(tmp_path, *line)
    else:
        early = jobs.hpcrun(*line, cwd=tmp_path)
        assert (early.returncode, early.stderr.count("\n")) == (2, 1), early.stderr
        assert "Slurm may still get the array" in early.stderr
        sweep = read_sweep(tmp_path / "runs" / "s")
        assert sweep is not None
        (sent,) = sweep.submissions
        write_sweep(replace(sweep, submissions=[replace(sent, time=sent.time - 200.0)]))
        assert "4 runs submitted" in hpcrun(tmp_path, *line)
        assert shown(tmp_path) == PENDING
    assert submissions(slurm) == 1


def test_a_deleted_run_of_an_array_without_a_record_is_submitted_again(
    tmp_path: Path, slurm: Path
) -> None:
    (slurm / "kill-after-1").touch()
    submit_killed_by_sbatch(tmp_path)
    shutil.rmtree(tmp_path / "runs" / "s" / "000")
    (script,) = (tmp_path / "runs" / "s" / "logs" / "submitit" / "000").glob("*.sh")
    if os.getuid() == 0:
        # Another user has submitted the array.
        os.chown(script, 12345, -1)
    told = hpcrun(tmp_path, "submit", *SHAPE, "--executor", "slurm", *AXES)
    assert "1 run submitted; 3 left as they are" in told
    questions = (slurm / "questions").read_text()
    users = sorted({os.getuid(), script.stat().st_uid})
    assert f"--user={','.join(map(str, users))} --format=%F" in questions
    (newest,) = (tmp_path / "runs" / "s" / "logs" / "submitit" / "000").glob("*_submission.sh")
    assert "#SBATCH --array=0\n" in newest.read_text()


def test_a_run_that_fills_no_pack_gets_a_job_of_its_own_size(tmp_path: Path, slurm: Path) -> None:
    hpcrun(tmp_path, "submit", *SHAPE, "--executor", "slurm", "--pack", "3", *AXES)
    folder = tmp_path / "runs" / "s"
    asked = {}
    for first in ("000", "003"):
        (script,) = (folder / "logs" / "submitit" / first).glob("*_submission.sh")
        asked[first] = [
            line.partition(" ")[2]
            for line in script.read_text().splitlines()
            if line.startswith(("#SBATCH --array", "#SBATCH --ntasks"))
        ]
    assert asked == {
        "000": ["--array=0", "--ntasks-per-node=3"],
        "003": ["--array=3", "--ntasks-per-node=1"],
    }
    runs = [RunDirectory(folder / f"{number:03d}") for number in range(4)]
    packs = [jobs.events(run, "submitted")[0].fields.get("pack") for run in runs]
    assert packs == [3, 3, 3, None]
