"""The batch step, with substitutes for Slurm's programs that record their calls."""

import errno
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from hpcrun.config import Config, to_yaml
from hpcrun.job.ending import conclude
from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.job.restart.requeue import Clock
from hpcrun.job.srun import BatchJob, RanksEnd, surviving
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import write_json
from hpcrun.slurm.avoided_nodes import add_failure, node_failures
from tests.support.journal import read_events, record_event

from .step_substitutes import FIRST, ROOT, SHOWN, Desk


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_srun_passes_everything_on_and_its_code_is_classified(desk: Desk) -> None:
    desk.answer("srun", "exit 3")
    open_attempt(desk.run, FIRST, Budgets(crash=0))
    assert desk.step() == 0, desk.told()
    (srun,) = desk.called("srun")
    log = desk.run.attempt_logs(Attempt("7", 0))
    assert srun == (
        "srun --kill-on-bad-exit=1 --wait=0 --unbuffered --export=ALL --job-name=hpcrun-7-0 "
        f"--output={log}/rank-%5t.log "
        f"{sys.executable} -u -m hpcrun.worker {desk.run.path}"
    )
    assert log.is_dir()
    assert desk.told().startswith("hpcrun: attempt 7-0 on n[1-2]\n")
    (ended,) = [event for event in read_events(desk.run) if event.tag == "ended"]
    assert (ended.cause, ended.exit_code) == ("crash", 3)
    assert "scontrol requeue 7" in desk.called("scontrol")


def test_a_full_disk_does_not_cost_the_requeue(desk: Desk) -> None:
    desk.answer("srun", "exit 3")
    open_attempt(desk.run, FIRST, Budgets(crash=1))
    assert desk.start(output=Path("/dev/full")).wait(timeout=300) == 0
    assert desk.ends() == ["crash"]
    assert "scontrol requeue 7" in desk.called("scontrol")


def test_a_signal_to_all_processes_lets_the_step_finalize(desk: Desk) -> None:
    open_attempt(desk.run, FIRST, Budgets())
    ready = desk.calls.parent / "ready"
    desk.answer("srun", f"trap 'exit 143' TERM; touch {ready}; while true; do sleep 0.1; done")
    step = desk.start()
    while not ready.exists():
        time.sleep(0.05)
    line = "slurmstepd-n1: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-21T19:48:15 ***\n"
    with (desk.run.logs / "batch-7.log").open("a") as log:
        log.write(line)
    os.killpg(step.pid, signal.SIGTERM)
    assert step.wait(timeout=300) == 143, desk.told()
    assert desk.ends() == ["cancelled"]
    assert not any("requeue" in call for call in desk.called("scontrol"))


def test_an_array_element_has_the_name_of_its_requeue(desk: Desk) -> None:
    desk.answer(
        "scontrol",
        f"[ $1 = show ] && printf 'JobId=7 ArrayJobId=5 ArrayTaskId=2 {SHOWN[8:]}'; true",
    )
    element = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "4"}
    (desk.run.logs / "batch-5_2.log").symlink_to("batch-7.log")
    desk.step(**element)
    assert "hpcrun: attempt 5_2-0 on n[1-2]" in desk.told()
    assert (desk.run.logs / "5_2" / "restart-0").is_dir()


def test_a_persons_own_script_takes_nothing_from_the_job_section(tmp_path: Path) -> None:
    desk = Desk(tmp_path, setup=["false"], container=["box"], python="/opt/python")
    desk.step("--own-script", SLURM_CPUS_PER_TASK="1")
    (srun,) = desk.called("srun")
    assert "--cpus-per-task=1 " in srun
    assert srun.endswith(f"{sys.executable} -u -m hpcrun.worker {desk.run.path}")


def test_a_folder_without_a_run_is_refused_unchanged(desk: Desk, tmp_path: Path) -> None:
    nothing = RunDirectory(tmp_path / "nothing")
    desk.run, log = nothing, desk.run.logs
    done = subprocess.run(
        [sys.executable, "-m", "hpcrun", "batch", str(nothing.path), "--own-script"],
        env={"PATH": f"{desk.bin}:/usr/bin", "SLURM_JOB_ID": "7", "PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith(f"hpcrun: {nothing.path}: no such run; make it with")
    assert (nothing.path.exists(), log.exists()) == (False, True)


@pytest.mark.parametrize("kind", ["denied", "disabled"])
def test_a_job_that_may_not_be_requeued_has_a_successor(desk: Desk, kind: str) -> None:
    words = {
        "denied": "Access/permission denied",
        "disabled": "Requested operation is presently disabled",
    }[kind]
    desk.answer(
        "scontrol",
        f"if [ $1 = show ]; then printf '{SHOWN}'; else echo '{words}' >&2; exit 1; fi",
    )
    desk.answer("sbatch", "echo 8")
    record_event(desk.run, "submitted", attempt=FIRST, executor="slurm", nodes=1, gpus=1)
    desk.run.batch_script.write_text("#!/bin/bash\n")
    open_attempt(desk.run, FIRST, Budgets())
    desk.answer("srun", "exit 1")
    assert desk.step() == 75, desk.told()
    script = desk.run.batch_script
    assert desk.called("sbatch") == [f"sbatch --parsable --dependency=afterany:7 {script}"]
    newest = [event for event in read_events(desk.run) if event.tag == "submitted"][-1]
    assert newest.attempt == Attempt("8", 0)
    assert newest.own == {"executor": "slurm", "nodes": 1, "gpus": 1, "continues": "7"}


def test_a_successor_leaves_out_a_node_that_failed_too_often(desk: Desk, tmp_path: Path) -> None:
    waits = "JobId=8 JobState=PENDING Reason=Dependency Partition=batch NumNodes=1\\n"
    desk.answer(
        "scontrol",
        f"""case "$*" in
        "show job 8") printf '{waits}' ;;
        "show job 7"*) printf '{SHOWN}' ;;
        "requeue 7") echo 'Access/permission denied' >&2; exit 1 ;;
        esac""",
    )
    desk.answer("sbatch", "echo 8")
    desk.answer("sinfo", "printf 'batch*|n%s|idle|8|100|(null)\\n' 1 2 3")
    record_event(desk.run, "submitted", attempt=FIRST, executor="slurm", nodes=1, gpus=1)
    desk.run.batch_script.write_text("#!/bin/bash\n")
    open_attempt(desk.run, FIRST, Budgets())
    add_failure(tmp_path / "hpcrun" / "nodes.jsonl", "n2", "killed by SIGBUS", "another run")
    desk.answer("srun", "echo 'srun: error: n2: task 1: Killed'; exit 137")
    assert desk.step(XDG_STATE_HOME=str(tmp_path)) == 75, desk.told()
    assert "scontrol update JobId=8 ExcNodeList=n2" in desk.called("scontrol"), desk.told()
    (excluded,) = [event for event in read_events(desk.run) if event.tag == "excluded"]
    assert (excluded.attempt, excluded.hosts) == (FIRST, ["n2"])
    # The new job has not begun: the log contains only its submission.
    later = [event.tag for event in read_events(desk.run) if event.attempt == Attempt("8", 0)]
    assert later == ["submitted"]


def test_a_run_that_no_job_continues_notifies_that_it_stopped(tmp_path: Path) -> None:
    sent = tmp_path / "sent"
    desk = Desk(tmp_path, watch={"notify": f"cat >> {sent}"})
    desk.answer(
        "scontrol",
        f"if [ $1 = show ]; then printf '{SHOWN}'; else echo 'Access/permission denied' >&2; exit 1; fi",
    )
    open_attempt(desk.run, FIRST, Budgets())
    desk.answer("srun", "exit 1")
    assert desk.step("--own-script") == 75, desk.told()
    (given_up,) = [event for event in read_events(desk.run) if event.tag == "given-up"]
    assert (given_up.attempt, given_up.cause) == (FIRST, "crash")
    message = json.loads(sent.read_text())
    assert (message["event"], message["cause"]) == ("stopped", "crash")
    words = "hpcrun does not know the options of your batch script"
    assert message["reason"].startswith(f"no job continues the run: {words}")
    assert f"no job continues a run: {words}" in desk.told()


@pytest.mark.parametrize(
    ("number", "survives"),
    [(signal.SIGTERM, False), (signal.SIGUSR2, True), (signal.SIGHUP, False)],
)
def test_a_container_that_waits_outlives_the_warning(
    number: signal.Signals, survives: bool
) -> None:
    wrapper = ["bash", "-c", 'echo up; "$@"; exit 5', "box"]
    with subprocess.Popen(
        [*surviving(wrapper), *wrapper, "sleep", "1"], stdout=subprocess.PIPE, text=True
    ) as box:
        assert box.stdout is not None
        box.stdout.readline()
        box.send_signal(number)
        assert box.wait() == (5 if survives else -number)


def test_a_folder_that_is_no_run_has_no_interpreter(desk: Desk) -> None:
    desk.run.config.unlink()
    desk.run.unstarted("7").write_text("n1\n")
    assert desk.step() == 2
    assert not desk.run.unstarted("7").exists()


def test_a_config_damaged_during_the_run_ends_it(desk: Desk) -> None:
    open_attempt(desk.run, FIRST, Budgets())
    config = shlex.quote(str(desk.run.config))
    desk.answer("srun", f"echo '[' > {config}; exit 1")
    assert desk.step() == 1, desk.told()
    assert "the end of 7-0 cannot be recorded" in desk.told()
    assert "correct the cause, then `hpcrun resume" in desk.told()
    assert "scontrol requeue 7" not in desk.called("scontrol")


def test_an_end_that_a_full_disk_refuses_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    desk = Desk(tmp_path, watch={"notify": f"cat > {tmp_path}/sent"})
    open_attempt(desk.run, FIRST, Budgets())
    waits: list[float] = []

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "events.jsonl")

    monkeypatch.setattr("hpcrun.run.journal.journal.append_line", full)
    clock = Clock(now=lambda: 0.0, sleep=waits.append)
    assert conclude(desk.run, BatchJob(FIRST), RanksEnd(137), clock).code == 137
    assert len(waits) == 2
    told = capsys.readouterr().err
    assert "the end of 7-0 cannot be recorded: [Errno 28]" in told
    assert "free some space there, then `hpcrun resume" in told
    assert [event.tag for event in read_events(desk.run)] == ["opened"]
    assert "free some space there" in json.loads((tmp_path / "sent").read_text())["reason"]
    # A script that a signal ended with exit code 0 is not finished.
    assert conclude(desk.run, BatchJob(FIRST), RanksEnd(0), clock).code == 1
    write_json(desk.run.result, {"state": "finished"})
    assert conclude(desk.run, BatchJob(FIRST), RanksEnd(0), clock).code == 0


def test_a_node_is_blamed_also_where_no_start_follows(tmp_path: Path) -> None:
    desk = Desk(tmp_path)
    config = Config.model_validate({"restarts": {"crash": 0}, "train": {"batch_size": 64}})
    desk.run.config.write_text(to_yaml(config))
    open_attempt(desk.run, FIRST, Budgets())
    desk.answer("srun", "echo 'srun: error: n2: task 1: Killed'; exit 137")
    assert desk.step(XDG_STATE_HOME=str(tmp_path)) == 137, desk.told()
    assert [entry.node for entry in node_failures(tmp_path / "hpcrun" / "nodes.jsonl", 0.0)] == [
        "n2"
    ]


def test_a_used_job_number_starts_and_records_nothing(desk: Desk) -> None:
    record_event(desk.run, "opened", attempt=FIRST, executor="slurm", cluster="one")
    assert desk.step(SLURM_CLUSTER_NAME="two") == 2
    assert "job 7 of cluster one already used this number" in desk.told()
    assert desk.called("srun") == []
    assert [event.tag for event in read_events(desk.run)] == ["opened"]


def test_a_recreated_run_is_not_finalized_by_its_old_job(desk: Desk) -> None:
    open_attempt(desk.run, FIRST, Budgets())
    place = shlex.quote(str(desk.run.path))
    again = f"cp -r {place} {place}2; rm -r {place}; mv {place}2 {place}"
    desk.answer("srun", f"{again}; echo '{{}} ' > {place}/run.json; exit 1")
    assert desk.step() == 1
    assert desk.ends() == []
    assert desk.called("scontrol")[-1] != "scontrol requeue 7"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("begin", ["step", "finalize", "worker"])
def test_a_run_of_another_user_starts_nothing(desk: Desk, tmp_path: Path, begin: str) -> None:
    away = desk.run.path.rename(tmp_path / "away")
    shutil.copytree(away, desk.run.path)
    os.chown(desk.run.path, 65534, -1)
    before = sorted(desk.run.path.rglob("*"))
    log, place = tmp_path / "log", str(desk.run.path)
    local = {"HPCRUN_LOCAL_CLUSTER": "1"} if begin == "finalize" else {}
    command = {
        "step": ["hpcrun", "batch", place],
        "finalize": ["hpcrun", "finalize", place, "--exit-code", "0"],
        "worker": ["hpcrun.worker", place],
    }[begin]
    started = desk.start(command=command, output=log, **local)
    assert started.wait(timeout=300) == 2
    (line,) = log.read_text().splitlines()
    assert "belongs to nobody, and commands in it would run as you" in line
    assert [
        call for call in desk.called("srun") + desk.called("scontrol") if "show" not in call
    ] == []
    assert sorted(desk.run.path.rglob("*")) == before


def test_another_own_config_starts_nothing_in_a_shared_folder(desk: Desk, tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    desk.start("--submitted", "0" * 32).wait(timeout=300)
    assert "is not the config that was submitted" in desk.told()
    assert desk.called("srun") == []
    tmp_path.chmod(0o755)
    assert desk.step("--submitted", "0" * 32) == 0
    assert len(desk.called("srun")) == 1
