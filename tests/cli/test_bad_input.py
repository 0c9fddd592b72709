"""Bad input gets one line (what, where, remedy) and exit code 2, and leaves nothing half made."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.cli.main import main
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from tests.cli.conftest import tiny_config
from tests.support import jobs
from tests.support.journal import read_events

Completed = subprocess.CompletedProcess


def listing(folder: Path) -> list[Path]:
    """Return every path under ``folder``."""
    return sorted(folder.rglob("*"))


def require_one_line(done: "Completed[str]", *parts: str) -> None:
    """Check for a refusal of one line on standard error with ``parts``, and exit code 2."""
    assert done.returncode == 2, done.stdout + done.stderr
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("hpcrun")
    for part in parts:
        assert part in line


CASES: dict[str, tuple[list[str], list[str]]] = {
    "no such command": (["sbumit"], ["sbumit", "did you mean submit?"]),
    "no such option of the program": (["--verison"], ["--verison", "did you mean --version?"]),
    "no such option": (["submit", "--nodez", "2"], ["--nodez", "did you mean --nodes?", "--help"]),
    "an option like no other": (["submit", "--after", "7"], ["--after: no such option (see"]),
    **{
        f"an option of another program: {words[0]}": (
            ["submit", *words],
            [words[0].split("=")[0], part],
        )
        for words, part in (
            (["-p", "gpu"], "use --partition"),
            (["-N2"], "use --nodes"),
            (["--gpus-per-node=4"], "use --gpus N"),
            (["--gres", "gpu:4"], "use --gpus N"),
            (["--nproc_per_node", "4"], "use --gpus N"),
            (["--mail-user", "a@b.c"], "'job.sbatch_args=[--mail-user=VALUE]'"),
            (["--output=x"], "use `hpcrun logs RUN`"),
            (["--lr", "0.1"], "use train.lr=VALUE without dashes"),
            (["--num-workers", "4"], "use data.workers"),
        )
    },
    "blanks around an equals sign": (
        ["submit", "train.lr", "=", "1"],
        ["train.lr=1: remove the bl"],
    ),
    "a blank after it": (["submit", "seed=", "1"], ["seed=1: remove the blanks"]),
    "a blank before a token": (["submit", "job.env.T", "=abc"], ["job.env.T", "remove the blanks"]),
    "a notebook": (["submit", "net.ipynb"], ["jupyter nbconvert --to script net.ipynb"]),
    "a second run": (["resume", "a", "b"], ["resume: b: one argument too many", "--help"]),
    "too few steps for the quick start": (
        ["submit", "train.steps=2"],
        ["the quick start:39: optim.warmup_steps: 30 is more than train.steps=2; lower it"],
    ),
    "half an option": (["submit", "--node", "2"], ["--node:", "did you mean --nodes?"]),
    "an option without its value": (["submit", "--nodes"], ["--nodes", "expected one argument"]),
    "no command after the dashes": (["submit", "--"], ["there is no command after `--`"]),
    "a command where none belongs": (["status", "--", "ls"], ["takes no command"]),
    "no nodes": (["submit", "--nodes", "0"], ["--nodes", "job.nodes", "at least 1"]),
    "an unknown key": (["submit", "train.lrr=1"], ["train.lrr", "did you mean train.lr?"]),
    "an unknown executor": (["submit", "--executor", "locl"], ["--executor", "mean local?"]),
    "an unknown task": (["submit", "task=language-modell"], ["language-modell", "language-model"]),
    "an unknown module": (["submit", "task=prob:Probe"], ["no module prob", "PYTHONPATH"]),
    "an unknown class": (["submit", "task=probe:Prob"], ["probe.py", "did you mean Probe?"]),
    "a module that is no Python": (
        ["submit", "task=broken:T"],
        ["broken.py:1", "correct the module first"],
    ),
    "no such config file": (["submit", "-c", "nope.yaml"], ["nope.yaml", "no such file"]),
    "a task by its file": (["submit", "task=./probe.py:Probe"], ["did you mean probe:Probe?"]),
    "a task without its key": (["submit", "probe:Probe"], ["task=probe:Probe"]),
    "a built-in task without its key": (["submit", "language-model"], ["task=language-model"]),
    "steps beyond any life": (["submit", "train.steps=" + "9" * 23], ["at most 1000000000000"]),
    "no such state": (["status", "--state", "dead"], ["invalid choice", "lost"]),
    "a config file without -c": (["submit", "my.yaml"], ["my.yaml", "-c my.yaml"]),
    "a script without dashes": (["submit", "train.py"], ["-- python train.py"]),
    "a config with a typo": (["submit", "-c", "typo.yaml"], ["typo.yaml:2", "train.lr"]),
    "a script that is not there": (
        ["submit", "--", "python", "missing.py", "--lr", "1"],
        ["missing.py: no such file in", "after `--`"],
    ),
    "a launcher without a script": (
        ["submit", "--launcher", "torchrun"],
        ["--launcher: job.launcher", "after `--`"],
    ),
    "a launcher with several tasks": (
        ["submit", "--launcher", "torchrun", "--tasks-per-node", "2", "--", "broken.py"],
        ["--tasks-per-node: job.tasks_per_node", "the only task of a node"],
    ),
    "several tasks for one training": (
        ["submit", "--gpus", "2", "--tasks-per-node", "1"],
        ["--tasks-per-node: job.tasks_per_node", "one task per GPU"],
    ),
    "a name with spaces": (["submit", "--name", "a b"], ["--name", "'a b'", "try a-b"]),
    "a name that is a command": (["submit", "--name", "$(touch x)"], ["--name", "try touch-x"]),
    "a name that leads elsewhere": (["submit", "--name", "../x"], ["--name", "try x"]),
    "an empty name": (["submit", "--name", ""], ["--name", "try run-1"]),
    "both to follow and not": (["submit", "--follow", "--detach"], ["exclude each other"]),
    "no such run": (["logs", "nope"], ["nope", "has no runs", "--runs-dir"]),
    "no such folder of runs": (["status", "--runs-dir", "nope"], ["nope", "--runs-dir"]),
    "a run's name beyond any file's": (["status", "a" * 400], ["no such run"]),
    "no run named": (["resume"], ["RUN", "--help"]),
    "a rank in words": (["logs", "nope", "--rank", "x"], ["--rank x", "or all"]),
    "no view of the config": (["config"], ["config show"]),
    "a misspelt view of the config": (["config", "shwo"], ["shwo", "did you mean show?"]),
    "finalize by hand": (["finalize", "x", "--exit-code", "0"], ["finalize", "local cluster"]),
}


@pytest.mark.parametrize(("arguments", "parts"), CASES.values(), ids=CASES.keys())
def test_bad_input_gets_one_line_and_leaves_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    parts: list[str],
) -> None:
    monkeypatch.chdir(folder)
    (folder / "broken.py").write_text("class T(:\n")
    (folder / "typo.yaml").write_text("train:\n  lrate: 1\n")
    before = listing(folder)
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert isinstance(ended.value.code, int)
    said = capsys.readouterr()
    require_one_line(Completed(arguments, ended.value.code, said.out, said.err), *parts)
    assert listing(folder) == before


def test_a_missing_current_folder_is_reported(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    code = "import os, sys; os.rmdir(os.getcwd()); os.execv(sys.executable, sys.argv[1:])"
    done = subprocess.run(
        [sys.executable, "-c", code, sys.executable, "-P", "-m", "hpcrun", "status"],
        cwd=gone, capture_output=True, text=True, check=False,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    require_one_line(done, "current folder is gone", "`cd`")


def test_unwritable_output_is_reported(folder: Path) -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "hpcrun", "config", "show"],
            cwd=folder, stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert "No space left on device" in line


def test_a_reader_that_has_seen_enough_is_no_error(folder: Path) -> None:
    command = f"{sys.executable} -m hpcrun config schema | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        cwd=folder, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "{\n", "")


def test_a_place_that_may_not_be_written_is_refused(folder: Path, refusable: list[str]) -> None:
    before = listing(folder)
    folder.chmod(0o555)
    done = subprocess.run(
        [*refusable, sys.executable, "-m", "hpcrun", "submit", "-c", "empty.yaml", *tiny_config(folder)],
        cwd=folder, env=os.environ | {"HOME": "/nonexistent"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    folder.chmod(0o755)
    require_one_line(done, "runs/empty", "Permission denied", "--runs-dir")
    assert listing(folder) == before


def test_the_run_of_another_user_is_reported_with_its_owner(
    finished_copy: Path, refusable: list[str]
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs two users, and so root")
    run = finished_copy / "runs" / "done"
    os.chown(run, 65534, 65534)
    run.chmod(0o700)
    for command in (["status", "done"], ["cancel", "done"], ["resume", "runs/done"]):
        done = subprocess.run(
            [*refusable, sys.executable, "-m", "hpcrun", *command],
            cwd=finished_copy, capture_output=True, text=True, check=False,
        )  # fmt: skip
        require_one_line(done, "runs/done", "no permission to read", f"ask its owner {run.owner()}")


def test_a_full_disk_at_submission_is_reported_and_left_unchanged(
    folder: Path, small_disk: Callable[[str], Path]
) -> None:
    refused = 0
    # One block more each time: the disk is full at one file of the submission after the other.
    for size in range(4, 80, 4):
        disk = small_disk(f"{size}k")
        done = jobs.hpcrun(
            "submit", "-c", "empty.yaml", "--runs-dir", str(disk / "runs"), "--no-snapshot",
            "--detach", *tiny_config(folder), cwd=folder,
        )  # fmt: skip
        if done.returncode == 0:
            break
        require_one_line(done, "space")
        assert listing(disk) == []
        refused += 1
    assert refused >= 4
    run = RunDirectory(disk / "runs" / "empty")
    jobs.hpcrun("cancel", "--now", str(run.path), cwd=folder)
    jobs.wait_for_end(run)


def test_a_full_disk_costs_the_checkpoint_not_the_training(
    folder: Path, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("1m")
    command = [
        "submit", "-c", "empty.yaml", "--name", "full", "--runs-dir", str(disk), "--no-snapshot",
        *tiny_config(folder, checkpoint__every=4),
    ]  # fmt: skip
    done = jobs.hpcrun(*command, cwd=folder)
    assert done.returncode == 74, done.stdout + done.stderr
    assert "step 4 was not saved" in done.stdout
    assert "step 10/10" in done.stdout
    run = RunDirectory(disk / "full")
    assert (read_json(run.result) or {})["cause"] == "save-failed"
    assert list(run.checkpoints.iterdir()) == []
    small_disk("64m")
    again = jobs.hpcrun(*command, cwd=folder)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (read_json(run.result) or {})["state"] == "finished"


PREEMPTED = """
import os, signal
from pathlib import Path
from probe import Probe

class Preempted(Probe):
    def meet(self, fault):
        sent = Path(self.config.data.own["log"]) / "sent"
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 6 and not sent.exists():
            sent.touch()
            os.kill(os.getpid(), signal.SIGUSR2)
"""


def test_a_stop_that_cannot_save_exits_with_74(
    folder: Path, small_disk: Callable[[str], Path]
) -> None:
    disk = small_disk("1m")
    (folder / "preempted.py").write_text(PREEMPTED)
    done = jobs.hpcrun(
        "submit", "-c", "empty.yaml", "--name", "full", "--runs-dir", str(disk), "--no-snapshot",
        *tiny_config(folder, task="preempted:Preempted", job__gpus=1, model__fault=1), cwd=folder,
    )  # fmt: skip
    assert done.returncode == 74, done.stdout + done.stderr
    run = RunDirectory(disk / "full")
    (ended,) = jobs.events(run, "ended")
    assert (ended.cause, ended.restart_allowed) == ("save-failed", False)
    assert ended.exit_code == 74
    assert [event.tag for event in read_events(run) if event.tag == "opened"] == ["opened"]
    (stopped,) = jobs.events(run, "stopped")
    assert (stopped.cause, stopped.committed) == ("warning", False)
    result = read_json(run.result) or {}
    assert (result["state"], result["cause"]) == ("failed", "save-failed")
    for words in (
        "a checkpoint needs 5.1 MB",
        "when it had to stop",
        "; free some space, or lower",
    ):
        assert words in result["reason"]
    assert list(run.checkpoints.iterdir()) == []

    small_disk("64m")
    again = jobs.hpcrun("resume", str(run.path), cwd=folder)
    assert again.returncode == 0, again.stdout + again.stderr
    assert (read_json(run.result) or {})["state"] == "finished"


def test_a_task_module_that_raises_ends_the_run_once(folder: Path) -> None:
    (folder / "angry.py").write_text("raise RuntimeError('no licence today')\nclass T: pass\n")
    done = jobs.hpcrun(
        "submit", "-c", "empty.yaml", "--name", "angry",
        *tiny_config(folder, task="angry:T"), cwd=folder,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    (line,) = [line for line in done.stdout.splitlines() if "no licence today" in line]
    for part in ("angry failed", "task: angry:T", "RuntimeError", "angry.py:1", "fix the input"):
        assert part in line
    run = RunDirectory(folder / "runs" / "angry")
    assert (read_json(run.result) or {})["cause"] == "bad-input"
    assert len(jobs.events(run, "opened")) == 1
    assert list(run.checkpoints.iterdir()) == []


def test_a_unicode_name_in_a_hostile_folder_works(tmp_path: Path) -> None:
    folder = tmp_path / "a b; $(touch owned) 'c\" #%j"
    folder.mkdir()
    jobs.write_probe(folder)
    (folder / "empty.yaml").write_text("{}\n")
    done = jobs.hpcrun(
        "submit", "-c", "empty.yaml", "--name", "größe-模型", *tiny_config(folder), cwd=folder
    )
    assert done.returncode == 0, done.stdout + done.stderr
    told = jobs.hpcrun("status", "größe-模型", cwd=folder)
    assert "größe-模型  finished" in told.stdout
    assert not list(tmp_path.rglob("owned"))
