"""The commands on runs in every state: live, canceled, finished, lost, and damaged by hand."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hpcrun.cli.main import COMMANDS, guarded
from hpcrun.config import Config
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import append_line, read_json
from hpcrun.slurm.local import job_files
from hpcrun.storage.store import CheckpointStore
from tests.checkpoint import faults
from tests.cli.conftest import tiny_config
from tests.cli.test_bad_input import listing, require_one_line
from tests.support import jobs


def submit_line(folder: Path, name: str, **changes: object) -> list[str]:
    """The command line of a tiny run."""
    return ["submit", "-c", "empty.yaml", "--name", name, *tiny_config(folder, **changes)]


def test_status_shows_no_run_one_run_and_many_runs(finished_copy: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    none = jobs.hpcrun("status", cwd=tmp_path / "empty")
    assert (none.returncode, none.stderr) == (0, "")
    assert "there are no runs in " in none.stdout
    assert jobs.hpcrun("status", "--json", cwd=tmp_path / "empty").stdout == ""
    runs = finished_copy / "runs"
    for number in range(12):
        shutil.copytree(runs / "done", runs / f"copy-{number}")
    one = jobs.hpcrun("status", "copy-3", cwd=finished_copy)
    heading, row, account = one.stdout.splitlines()
    assert heading.split()[:5] == ["name", "state", "step", "done", "loss"]
    # Though the last line of its metrics is of the validation.
    assert re.match(r"copy-3 +finished.* 10/10 +100% +\d+\.\d{4} ", row)
    assert account.startswith("copy-3: ")
    parts = ("since submission: ", "start-up ", "productive ", "checkpoint ", "(ETTR) ")
    assert all(part in account for part in parts)
    assert len(jobs.hpcrun("status", cwd=finished_copy).stdout.splitlines()) == 14
    missing = jobs.hpcrun("status", "copy-33", cwd=finished_copy)
    require_one_line(missing, "copy-33", "did you mean copy-3")


def test_json_is_json_whatever_the_run_has_logged(finished_copy: Path) -> None:
    run = RunDirectory(finished_copy / "runs" / "done")
    append_line(run.metrics, {"step": 11, "loss": float("nan")})
    told = json.loads(jobs.hpcrun("status", "--json", cwd=finished_copy).stdout)
    assert (told["state"], told["step"], told["loss"]) == ("finished", 11, None)
    assert jobs.hpcrun("status", cwd=finished_copy).stdout.splitlines()[1].split()[4:5] == ["nan"]
    account = told["goodput"]
    assert account == (read_json(run.result) or {})["goodput"]
    ratio, wall = account.pop("ettr"), account.pop("wall")
    assert sum(account.values()) == pytest.approx(wall, abs=0.01)
    assert ratio == pytest.approx(account["productive"] / wall, abs=0.001)
    resumed = json.loads(jobs.hpcrun("resume", "done", "--json", cwd=finished_copy).stdout)
    assert resumed["result"]["state"] == "finished"
    again = jobs.hpcrun(*submit_line(finished_copy, "done", data__log=str(finished_copy)), "--json",
                        cwd=finished_copy)  # fmt: skip
    # Its log had another path during training: another config, and so another run.
    require_one_line(again, "is a run of another config", "data.log", "--name")
    shown = json.loads(jobs.hpcrun("config", "show", "--json", "model.x=.nan", "task=probe:Probe",
                                   cwd=finished_copy).stdout)  # fmt: skip
    assert shown["model"]["x"] is None
    assert "properties" in json.loads(jobs.hpcrun("config", "schema", cwd=finished_copy).stdout)


def test_a_dry_run_shows_script_and_config_and_writes_nothing(folder: Path) -> None:
    before = listing(folder)
    line = submit_line(folder, "dry")
    told = jobs.hpcrun(*line, "--dry-run", cwd=folder)
    assert told.returncode == 0, told.stderr
    assert "#!/bin/bash" in told.stdout
    assert "\ntask: probe:Probe\n" in told.stdout
    as_json = json.loads(jobs.hpcrun(*line, "--dry-run", "--json", cwd=folder).stdout)
    assert as_json["config"]["train"]["steps"] == 10
    assert as_json["script"] in told.stdout
    assert listing(folder) == before


def test_defaults_of_a_user_for_sbatch_lie_below_the_profile(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    for name, value in (("ACCOUNT", "astro"), ("QOS", "low"), ("PARTITION", "gpu")):
        monkeypatch.setenv(f"SBATCH_{name}", value)
    (folder / "site.yaml").write_text("job: {qos: high}\n")
    line = [*submit_line(folder, "dry"), "--profile", "./site.yaml", "--partition", "big"]
    assert guarded([*line, "--executor", "slurm", "--dry-run"]) == 0
    shown = capsys.readouterr()
    for option in ("--account=astro", "--qos=high", "--partition=big"):
        assert f"#SBATCH {option}\n" in shown.out
    monkeypatch.setenv("SBATCH_TIMELIMIT", "tomorrow")
    assert guarded([*line, "--dry-run"]) == 2
    assert "$SBATCH_TIMELIMIT: job.time: should be a time limit" in capsys.readouterr().err


def test_without_a_config_an_own_task_has_the_plain_defaults(folder: Path) -> None:
    def shown(*line: str) -> dict[str, Any]:
        told = jobs.hpcrun("submit", "--dry-run", "--json", *line, cwd=folder)
        assert told.returncode == 0, told.stderr
        config: dict[str, Any] = json.loads(told.stdout)["config"]
        return config

    own = shown("task=probe:Probe", "train.lr=0.5", "--executor", "local")
    asked = {"name": "Probe", "task": "probe:Probe", "train": {"lr": 0.5}}
    plain = Config.model_validate(asked | {"job": {"executor": "local"}})
    assert own == plain.model_dump(mode="json")
    with (folder / "probe.py").open("a") as probe:
        probe.write("\n_Hidden = type('_Hidden', (Probe,), {})\n__ = type('__', (Probe,), {})\n")
    assert shown("task=probe:_Hidden")["name"] == "Hidden"
    assert shown("task=probe:__")["name"] == "run"
    quick = shown("task=language-model")
    assert (quick["name"], quick["train"]["steps"]) == ("quickstart", 300)


def test_help_fits_a_terminal(folder: Path) -> None:
    for command in ("", *COMMANDS):
        told = jobs.hpcrun(*command.split(), "--help", cwd=folder, env={"COLUMNS": "80"})
        assert told.returncode == 0, told.stderr
        assert max(map(len, told.stdout.splitlines())) <= 80, told.stdout


def test_a_live_run_is_preempted_cancelled_and_resumed(folder: Path) -> None:
    line = submit_line(folder, "live", model__pause=0.05, train__steps=4000)
    begun = jobs.hpcrun(*line, "--detach", cwd=folder)
    assert begun.returncode == 0, begun.stderr
    for what in ("logs -f live", "status live", "cancel live", "resume live"):
        assert f"hpcrun {what}" in begun.stdout
    run = RunDirectory(folder / "runs" / "live")
    for again in (line, ["resume", "live"], [*line, "--json"]):
        refused = jobs.hpcrun(*again, cwd=folder)
        require_one_line(refused, "live: job", "has it already", "hpcrun logs -f live", "--name")
    jobs.wait_for_step(run, 2)
    (told,) = jobs.hpcrun("status", "live", "--json", cwd=folder).stdout.splitlines()
    assert json.loads(told)["state"] == "running"
    for rank, count in (("0", 1), ("1", 0), ("all", 1)):
        said = jobs.hpcrun("logs", "live", "--rank", rank, cwd=folder)
        assert said.stdout.count("starting at step 0") == count
    assert "SIGUSR2 to all ranks" in jobs.hpcrun("preempt", "live", cwd=folder).stdout
    jobs.wait_for_step(run, 4, restart=1)
    done = jobs.hpcrun("cancel", "live", cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    step = (read_json(run.result) or {})["step"]
    assert f"live is cancelled at step {step}" in done.stdout
    for command in ("cancel", "preempt"):
        require_one_line(
            jobs.hpcrun(command, "live", cwd=folder), "live: is not running (cancelled)"
        )
    resumed = json.loads(jobs.hpcrun("resume", "live", "--json", cwd=folder).stdout)
    assert resumed == {
        "run": str(run.path),
        "executor": "local",
        "job_id": resumed["job_id"],
    }
    killed = jobs.hpcrun("cancel", "--now", "live", cwd=folder)
    assert "live is cancelled" in killed.stdout
    assert "cancelled" in jobs.hpcrun("status", cwd=folder).stdout


def _tear_events(run: RunDirectory) -> None:
    with run.events.open("a") as log:
        log.write('null\n[1]\n{"event":"ended","cause":"martian","job":"x","restart":"q"}\n')
        log.write('{"event":"ended","time":"noon"}\n{"event":"submitted","job":"9","ti')


def _empty_record(run: RunDirectory) -> None:
    run.record.write_text("")


def _garbage_metrics(run: RunDirectory) -> None:
    run.metrics.write_text('x\n{"step":"a","loss":"b"}\n')


def _no_logs(run: RunDirectory) -> None:
    shutil.rmtree(run.logs)


def _no_events(run: RunDirectory) -> None:
    run.events.unlink()


def _empty_job_state(run: RunDirectory) -> None:
    for state in run.logs.glob("*/job.json"):
        state.write_text('{"job_id": 3}')


@pytest.mark.parametrize(
    "damage",
    [_tear_events, _empty_record, _garbage_metrics, _no_logs, _no_events, _empty_job_state],
)
def test_a_damaged_run_still_counts_as_finished(
    finished_copy: Path, damage: Callable[[RunDirectory], None]
) -> None:
    damage(RunDirectory(finished_copy / "runs" / "done"))
    told = jobs.hpcrun("status", "--json", cwd=finished_copy)
    assert (told.returncode, told.stderr) == (0, "")
    assert json.loads(told.stdout)["state"] == "finished"
    resumed = jobs.hpcrun("resume", "done", cwd=finished_copy)
    assert resumed.returncode == 0, resumed.stderr
    assert "is finished already" in resumed.stdout


def test_a_run_without_its_config_says_what_is_missing(finished_copy: Path) -> None:
    RunDirectory(finished_copy / "runs" / "done").config.unlink()
    for command in (["status", "done"], ["resume", "done"], submit_line(finished_copy, "done")):
        require_one_line(
            jobs.hpcrun(*command, cwd=finished_copy), "runs/done", "without its config.yaml", "move"
        )


def test_a_damaged_config_is_reported_with_its_line(finished_copy: Path) -> None:
    run = RunDirectory(finished_copy / "runs" / "done")
    run.config.write_text("train: {steps: 3\n")
    run.result.unlink()
    require_one_line(jobs.hpcrun("resume", "done", cwd=finished_copy), f"{run.config}:2")


def test_a_result_that_is_damaged_is_written_again_by_resume(finished_copy: Path) -> None:
    run = RunDirectory(finished_copy / "runs" / "done")
    run.result.write_text("{{{")
    told = jobs.hpcrun("status", "done", cwd=finished_copy)
    assert "lost" in told.stdout
    assert "result.json is gone or damaged; `hpcrun resume` writes it again" in told.stdout
    resumed = jobs.hpcrun("resume", "done", cwd=finished_copy)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert (read_json(run.result) or {})["state"] == "finished"


def test_a_run_with_a_killed_controller_is_lost(finished_copy: Path) -> None:
    run = RunDirectory(finished_copy / "runs" / "done")
    run.result.unlink()
    (state,) = run.logs.glob("*/job.json")
    state.write_text(json.dumps(json.loads(state.read_text()) | {"state": "RUNNING"}))
    told = json.loads(jobs.hpcrun("status", "--json", cwd=finished_copy).stdout)
    assert (told["state"], told["detail"][:22]) == ("lost", "its controller is gone")
    require_one_line(jobs.hpcrun("cancel", "done", cwd=finished_copy), "is not running (lost)")


def test_a_run_may_become_longer_before_its_learning_rate_falls(finished_copy: Path) -> None:
    run = RunDirectory(finished_copy / "runs" / "done")
    longer = [*submit_line(finished_copy, "done", train__steps=40), "optim.schedule=wsd"]
    require_one_line(jobs.hpcrun(*longer, cwd=finished_copy), "of another config", "train.steps")
    # As if it had stopped at its only checkpoint, step 10.
    begun = run.config.read_text().replace("steps: 10\n", "steps: 20\n")
    begun = re.sub(r"(?m)^  log: .*$", f"  log: {finished_copy}", begun)
    run.config.write_text(begun.replace("schedule: cosine", "schedule: constant"))
    run.result.unlink()
    prepared = jobs.hpcrun(*longer, "--prepare", cwd=finished_copy)
    assert prepared.returncode == 0, prepared.stderr
    assert "steps: 40\n" in run.config.read_text()
    shorter = [*longer, "--prepare", "train.steps=11"]
    told = "10 steps are done, and the length may change only before the learning rate decays"
    require_one_line(jobs.hpcrun(*shorter, cwd=finished_copy), "train.steps: 40 -> 11", told)


def test_a_folder_that_is_no_run_is_not_written_into(folder: Path) -> None:
    (folder / "runs" / "taken").mkdir(parents=True)
    (folder / "runs" / "file").write_text("")
    for name, what in (("taken", "a folder that is not a run"), ("file", "a file")):
        done = jobs.hpcrun(*submit_line(folder, name), cwd=folder)
        require_one_line(done, f"runs/{name}", what, "--name")
    assert list((folder / "runs" / "taken").iterdir()) == []


def test_the_debug_executor_trains_here_and_reports_its_end(folder: Path) -> None:
    (folder / "alone.py").write_text(
        "from probe import Probe\n"
        "class Alone(Probe):\n"
        "    def note(self, indices):\n"
        "        if self.config.model.own.get('angry'):\n"
        "            raise ValueError('not today')\n"
    )
    line = submit_line(
        folder, "alone", task="alone:Alone", job__gpus=1, job__executor="debug", train__steps=3
    )
    require_one_line(jobs.hpcrun(*line, "--json", cwd=folder), "--json", "debug")
    angry = jobs.hpcrun(*line, "model.angry=true", cwd=folder)
    assert angry.returncode == 1
    assert "ValueError: not today" in angry.stderr
    told = jobs.hpcrun("status", "alone", cwd=folder).stdout
    assert "failed" in told
    assert "debug" in told
    assert "not today" in told


def test_a_manifest_that_cannot_be_read_costs_its_step_only(finished_copy: Path) -> None:
    run = RunDirectory(finished_copy / "runs" / "done")
    run.result.unlink()
    (run.checkpoints / "step-000000040" / "manifest.json").mkdir(parents=True)
    # One checkpoint more than is kept now: nothing is saved after the last step, so the start must remove it.
    faults.save(CheckpointStore(run.checkpoints, "test-0"), 5)
    run.config.write_text(run.config.read_text().replace("  keep: 3\n", "  keep: 1\n"))
    again = jobs.hpcrun("resume", "done", cwd=finished_copy)
    assert again.returncode == 0, again.stderr
    assert "step 40 skipped: " in again.stdout
    assert "resumed from step 10" in again.stdout
    kept = sorted(path.name[:22] for path in run.checkpoints.iterdir())
    assert kept == ["damaged-step-000000040", "step-000000010"]
    assert [event.cause for event in jobs.events(run, "ended")] == ["finished", "finished"]


def test_a_local_job_differs_from_a_process_with_its_pid(tmp_path: Path) -> None:
    status = job_files.JobStatus("1", "RUNNING", 0, os.getpid(), 12.5, [])
    assert not job_files.is_alive(status)
    job_files.write_status(tmp_path, status)
    with pytest.raises(Exception, match="is not running on this machine"):
        job_files.send(tmp_path, signal.SIGTERM)
