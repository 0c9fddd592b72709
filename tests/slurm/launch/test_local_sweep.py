"""A sweep on the local cluster: its own end for each element, a queue, cancellation while waiting, again."""

import json
import sys
from pathlib import Path

from hpcrun.run.directory import RunDirectory
from hpcrun.run.record import SubmissionLock
from hpcrun.run.sweep_file import read_sweep
from hpcrun.slurm.launch import jobs as run_jobs
from tests.support import jobs

# Elements with `wait` stay until somebody makes the file `go`.
ELEMENT = """
import pathlib, sys, time
kind, seed = sys.argv[1:]
print("element", kind, seed, flush=True)
started = pathlib.Path("started-" + seed)
others = [p for p in pathlib.Path().glob("running-*")]
(pathlib.Path("running-" + seed)).touch()
with open("seen", "a") as seen:
    seen.write(f"{len(others)}\\n")
while kind == "wait" and not pathlib.Path("go").exists():
    time.sleep(0.05)
pathlib.Path("running-" + seed).unlink()
sys.exit(3 if kind == "crash" and not pathlib.Path("luck").exists() else 0)
"""
SHAPE = ("--nodes", "1", "--gpus", "1", "--cpu", "--executor", "local", "--no-snapshot")


def submit(folder: Path, *arguments: str) -> str:
    (folder / "element.py").write_text(ELEMENT)
    command = [sys.executable, "element.py", "{kind}", "{seed}"]
    done = jobs.hpcrun(
        "submit", "--name", "s", *SHAPE, "restarts.crash=0", *arguments, "--", *command, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def runs_of(folder: Path) -> dict[str, RunDirectory]:
    sweep = read_sweep(folder / "runs" / "s")
    assert sweep is not None
    return sweep.directories


def states(folder: Path) -> dict[str, str]:
    return {name: run_jobs.state(run).word for name, run in runs_of(folder).items()}


def test_the_same_line_adds_the_missing_elements(
    tmp_path: Path,
) -> None:
    line = ("--sweep", "kind=ok,crash", "--sweep", "seed=0:2", "--max-parallel", "2")
    submit(tmp_path, *line)
    jobs.wait_for(lambda: set(states(tmp_path).values()) <= {"finished", "failed"})
    expected = {"000": "finished", "001": "finished", "002": "failed", "003": "failed"}
    assert states(tmp_path) == expected
    assert "element crash 1" in jobs.hpcrun("logs", "s/003", cwd=tmp_path).stdout
    (tmp_path / "luck").touch()
    grown = ("--sweep", "kind=ok,crash", "--sweep", "seed=0:3", "--max-parallel", "2")
    told = submit(tmp_path, *grown, "--dry-run", "--json")
    actions = {Path(one["run"]).name: one["action"] for one in json.loads(told)["runs"]}
    assert actions == {
        "000": "finished", "001": "finished", "004": "new", "002": "again", "003": "again", "005": "new",
    }  # fmt: skip
    submit(tmp_path, *grown)
    jobs.wait_for(lambda: set(states(tmp_path).values()) == {"finished"})
    counts = {name: len(jobs.events(run, "submitted")) for name, run in runs_of(tmp_path).items()}
    assert counts == {"000": 1, "001": 1, "002": 2, "003": 2, "004": 1, "005": 1}
    # No more than --max-parallel have run at the same time.
    assert {int(line) for line in (tmp_path / "seen").read_text().split()} <= {0, 1}
    assert "nothing to submit; 6 runs: 6 finished" in submit(tmp_path, *grown)


def test_an_element_is_cancelled_while_it_waits_in_the_queue(tmp_path: Path) -> None:
    submit(tmp_path, "--sweep", "kind=wait", "--sweep", "seed=0:3", "--max-parallel", "1")
    jobs.wait_for(lambda: states(tmp_path)["000"] == "running")
    assert states(tmp_path)["001"] == "pending"
    done = jobs.hpcrun("cancel", "s/001", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert states(tmp_path)["001"] == "cancelled"
    # One that waits holds its place: the same line leaves it, and a resume of it is refused.
    again = jobs.hpcrun("resume", "s/002", "--detach", cwd=tmp_path)
    assert again.returncode == 2
    assert "has it already (pending)" in again.stderr
    (tmp_path / "go").touch()
    jobs.wait_for(lambda: states(tmp_path)["002"] == "finished")
    assert states(tmp_path) == {"000": "finished", "001": "cancelled", "002": "finished"}
    resumed = jobs.hpcrun("resume", "s/001", "--detach", cwd=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    jobs.wait_for(lambda: states(tmp_path)["001"] == "finished")


def test_what_cannot_be_submitted_leaves_nothing(tmp_path: Path) -> None:
    for arguments, line in (
        (("--sweep", "seed=0:2", "--", "true"), "seed: has no effect"),
        (("--sweep", "seed=0:2", "--", "echo", "{sed}"), "did you mean {seed}?"),
        (("--sweep", "seed=0:2", "--prepare", "--", "echo", "{seed}"), "--prepare"),
        (("--sweep", "seed=0:2", "--executor", "debug", "--", "echo", "{seed}"), "debug"),
        (("--max-parallel", "2", "--", "true"), "give the swept keys with --sweep"),
        (
            ("--sweep", "seed=0:2", "--max-parallel", "x", "--", "echo", "{seed}"),
            "invalid int value",
        ),
        (("--sweep-file", "none.yaml", "--", "true"), "no such file"),
    ):
        done = jobs.hpcrun("submit", *SHAPE, "--name", "s", *arguments, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert line in done.stderr
    assert not (tmp_path / "runs").exists()


def test_two_submissions_of_one_sweep_exclude_each_other(tmp_path: Path) -> None:
    line = ("submit", *SHAPE, "--name", "s", "--sweep", "seed=0:2", "--", "echo", "{seed}")
    folder = tmp_path / "runs" / "s"
    folder.mkdir(parents=True)
    with SubmissionLock(RunDirectory(folder)):
        done = jobs.hpcrun(*line, cwd=tmp_path)
        assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
        assert "another process is submitting this run" in done.stderr
        assert [path.name for path in folder.iterdir()] == ["submitting.lock"]
    done = jobs.hpcrun(*line, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # A resume of an element takes the lock of the sweep.
    jobs.wait_for(lambda: set(states(tmp_path).values()) == {"finished"})
    runs_of(tmp_path)["000"].result.unlink()
    with SubmissionLock(RunDirectory(folder)):
        done = jobs.hpcrun("resume", "s/000", "--detach", cwd=tmp_path)
        assert "another process is submitting this run" in done.stderr
    named = jobs.hpcrun("resume", "s", cwd=tmp_path)
    assert named.returncode == 2
    assert "is a sweep; name one of its runs, such as s/000" in named.stderr


def test_a_cancelled_sweep_ends_its_running_and_its_waiting_runs(tmp_path: Path) -> None:
    submit(
        tmp_path, "--sweep", "kind=wait", "--sweep", "seed=0:3", "--max-parallel", "1", "--detach"
    )
    jobs.wait_for(lambda: (tmp_path / "running-0").exists())
    done = jobs.hpcrun("cancel", "s", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    # The waiting runs come first: no run may start in the place of a cancelled run.
    named = [line.split(":")[1].strip() for line in done.stdout.splitlines()]
    assert named == ["s/001", "s/002", "s/000"]
    assert set(states(tmp_path).values()) == {"cancelled"}
    again = jobs.hpcrun("cancel", "s", cwd=tmp_path)
    assert (again.returncode, again.stdout) == (0, "hpcrun: s: no run of the sweep has a job\n")


def test_runs_of_another_command_are_not_of_the_sweep(tmp_path: Path) -> None:
    line = ("submit", *SHAPE, "--name", "s", "--sweep", "seed=0:2", "--")
    first = jobs.hpcrun(*line, "echo", "{seed}", cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    jobs.wait_for(lambda: set(states(tmp_path).values()) == {"finished"})
    other = jobs.hpcrun(*line, "printf", "{seed}", cwd=tmp_path)
    assert (other.returncode, other.stderr.count("\n")) == (2, 1), other.stderr
    assert "is a run of another config" in other.stderr


def test_a_sweep_hides_the_url_of_its_webhook(tmp_path: Path) -> None:
    secret = "https://hooks.example.org/T0/secret"
    given = (f"watch.notify=echo {secret}", "--sweep", "seed=0:1", "--", "echo", "{seed}")
    done = jobs.hpcrun("submit", *SHAPE, "--name", "s", *given, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (run,) = runs_of(tmp_path).values()
    assert "/secret" not in run.record.read_text()
    assert "/secret" not in (tmp_path / "runs" / "s" / "sweep.json").read_text()
    jobs.wait_for(lambda: set(states(tmp_path).values()) == {"finished"})
