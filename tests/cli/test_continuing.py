"""A run with a name that is submitted with another config continues or is refused."""

import json
import os
import shutil
import tempfile
from pathlib import Path

import psutil
import pytest

from hpcrun.api.submission.continuing import require_unchanged
from hpcrun.cli.main import guarded
from hpcrun.config import load_resolved, override_layer, recorded, resolve
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.slurm.local.job_files import JobStatus, write_status
from hpcrun.storage.manifest import Manifest, encode
from tests.support.journal import record_event

LINE = ["submit", "--prepare", "--no-snapshot", "--cpu", "task=probe:Probe", "--name", "one"]


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """Return a run prepared with ``train.lr=0.1``, in the working directory's ``runs``."""
    monkeypatch.chdir(folder)
    (folder / "x.py").touch()
    assert guarded([*LINE, "train.lr=0.1"]) == 0
    return RunDirectory(folder / "runs" / "one")


def content(run: RunDirectory) -> dict[Path, bytes]:
    """Return every file of ``run``."""
    return {path: path.read_bytes() for path in run.path.rglob("*") if path.is_file()}


def test_a_run_keeps_its_config(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    before = content(run)
    for how in ([], ["--dry-run"], ["--dry-run", "--json"]):
        assert guarded([*LINE, "train.lr=0.2", *how]) == 2
        told = capsys.readouterr().err
        assert "is a run of another config (train.lr: 0.1 -> 0.2)" in told
        assert told.endswith(", or remove the folder\n")
    assert content(run) == before
    (run.checkpoints / "step-000000003").mkdir()
    assert guarded([*LINE, "train.lr=0.1", "checkpoint.keep=1"]) == 0
    told = capsys.readouterr().err
    assert "hpcrun: one: continues with another config: checkpoint.keep: 3 -> 1\n" in told
    assert load_resolved(run.config).checkpoint.keep == 1


def test_a_config_edited_after_a_save_is_refused(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = run.checkpoints / "step-000000003"
    folder.mkdir()
    meta = {"config": recorded(load_resolved(run.config))}
    (folder / "manifest.json").write_bytes(encode(Manifest(3, 1, "7-0", 0.0, (), meta)))
    run.config.write_text(run.config.read_text().replace("seed: 0", "seed: 1"))
    before = content(run)
    assert guarded(["resume", "one"]) == 2
    line = f"{run.config}: cannot continue from step 3, which was saved with another config: seed: 0 -> 1; "
    assert line in capsys.readouterr().err
    assert content(run) == before


def test_a_run_of_another_user_is_not_continued(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = content(run)
    monkeypatch.setattr(os, "geteuid", lambda: 54321)
    # The folder of another user takes no new file.
    monkeypatch.setattr(
        tempfile, "TemporaryFile", lambda dir: Path(dir, "closed", "x").read_bytes()
    )
    for command in ([*LINE, "train.lr=0.1"], ["resume", "one"]):
        assert guarded(command) == 2
        assert "commands in its config would run as you" in capsys.readouterr().err
    assert content(run) == before


def test_a_run_with_lost_checkpoints_is_refused(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    record_event(run, "submitted", attempt=Attempt("7", 0), executor="local")
    record_event(run, "saved", step=3, attempt=Attempt("7", 0))
    run.metrics.write_text("the old ones\n")
    run.checkpoints.rmdir()
    before = content(run)
    line = [*LINE, "train.lr=0.1"]
    for command in (line, [*line, "--dry-run"], ["resume", "one"]):
        assert guarded(command) == 2
        told = capsys.readouterr().err
        assert "checkpoints: step 3 was saved, and no checkpoint is left: " in told
        assert "put the folder back, or start a new run with" in told
    assert content(run) == before


def test_another_config_without_a_name_is_a_numbered_run(
    run: RunDirectory, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = run.path.parent
    line = ["submit", "--prepare", "--no-snapshot", "--json", "--", "python", "x.py", "--lr"]

    def name(lr: str, *options: str) -> str:
        assert guarded([*line[:-4], *options, *line[-4:], lr]) == 0
        return Path(json.loads(capsys.readouterr().out)["run"]).name

    assert name("1") == "x"
    assert name("3", "--dry-run") == "x-2"
    assert guarded([*line, "3"]) == 0
    told = capsys.readouterr().err
    assert "x: is a run of another config (command: ['python', 'x.py', '--lr', '1'] -> " in told
    assert told.endswith("; the new run is x-2\n")
    assert load_resolved(runs / "x-2" / "config.yaml").name == "x-2"
    assert name("4") == "x-3"
    # The same command finds its run, also after the removal of another.
    shutil.rmtree(runs / "x")
    assert [name("3"), name("4")] == ["x-2", "x-3"]
    assert name("5") == "x"
    # A name that is given stays: on the command line, or in the config.
    Path("x.yaml").write_text("name: x\ncommand: [python, x.py]\n")
    for given in (["--name", "x"], ["name=x"], ["-c", "x.yaml"]):
        assert guarded([*line[:-4], *given, *line[-4:], "7"]) == 2
        assert "is a run of another config" in capsys.readouterr().err
    # The first error is that of the new run.
    monkeypatch.setenv("PATH", "")
    assert guarded(["submit", "--executor", "slurm", *line[-4:], "8"]) == 2
    assert "there is no sbatch on PATH" in capsys.readouterr().err


def test_the_names_of_sweeps_and_waiting_runs_are_taken(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    runs, script = run.path.parent, ["--", "python", "x.py"]
    (runs / "x").mkdir()
    (runs / "x" / "sweep.json").write_text("{}")
    line = ["submit", "--prepare", "--no-snapshot"]
    assert guarded([*line, *script]) == 0
    waiting = RunDirectory(runs / "x-2")
    record_event(waiting, "submitted", attempt=Attempt("7", 0), executor="local")
    me = psutil.Process()
    waiting.job_logs("7").mkdir()
    status = JobStatus("7", "RUNNING", 0, me.pid, me.create_time(), [])
    write_status(waiting.job_logs("7"), status)
    assert guarded([*line, *script, "2"]) == 0
    assert (runs / "x-3" / "config.yaml").exists()
    # The same command again must not train twice.
    assert guarded([*line, *script]) == 2
    assert "x-2: job 7 has it already" in capsys.readouterr().err


def test_a_script_that_reported_a_save_needs_no_checkpoints(
    run: RunDirectory,
) -> None:
    line = ["submit", "--prepare", "--no-snapshot", "--name", "script", "--", "python", "x.py"]
    assert guarded(line) == 0
    script = RunDirectory(run.path.with_name("script"))
    record_event(script, "opened", attempt=Attempt("7", 0), executor="local", script=True)
    record_event(script, "saved", attempt=Attempt("7", 0), step=3)
    assert guarded(line) == 0


def test_a_submission_that_fails_puts_the_old_config_back(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run.metrics.write_text("the old one\n")
    run.tensorboard.mkdir()
    (run.tensorboard / "events").write_text("x")
    before = content(run)
    monkeypatch.setenv("PATH", "")
    line = [word for word in LINE if word != "--prepare"]
    assert guarded([*line, "--executor", "slurm", "train.lr=0.1", "checkpoint.keep=1"]) == 2
    assert "there is no sbatch on PATH" in capsys.readouterr().err
    assert content(run) == before


def test_a_resume_notices_a_config_that_changed_meanwhile(run: RunDirectory) -> None:
    other = resolve([override_layer(["train.lr=0.2", "task=probe:Probe", "job.cpu=true"])])
    with pytest.raises(RunError, match="changed its config just now"):
        require_unchanged(run, other)
