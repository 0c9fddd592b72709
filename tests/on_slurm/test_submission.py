"""The answers of sbatch, and the messages of hpcrun."""

import contextlib
import os
import shutil
import signal
from pathlib import Path

import psutil
import pytest

from hpcrun.run.directory import RunDirectory
from tests.support import jobs

from .cluster import PATIENCE, SlurmCluster

pytestmark = pytest.mark.slurm
NEEDED = ("sbatch", "scontrol", "srun", "setsid", "env", "git")


@pytest.fixture
def runs(slurm: SlurmCluster) -> Path:
    return slurm.shared / "submission-runs"


def line(slurm: SlurmCluster, runs: Path, name: str, *more: str) -> list[str]:
    """Return the command that submits a job of one rank that does nothing."""
    return [
        slurm.python, "-m", "hpcrun", "submit", "--name", name, "--cpu",
        "--nodes", "1", "--gpus", "1", "--runs-dir", str(runs), "--json", *more, "--", "true",
    ]  # fmt: skip


def submit(slurm: SlurmCluster, runs: Path, name: str, *more: str) -> "tuple[int, str, str]":
    """Submit a job of one rank that does nothing, and return exit code and both outputs."""
    command = line(slurm, runs, name, *more)
    done = slurm.run(command, cwd=slurm.shared, check=False)
    return done.returncode, done.stdout, done.stderr


def test_a_refusal_quotes_slurm_and_leaves_no_files(slurm: SlurmCluster, runs: Path) -> None:
    slurm.admin("scontrol", "update", "PartitionName=urgent", "Hidden=YES")
    try:
        code, _, told = submit(slurm, runs, "nowhere", "--partition", "nope")
        _, _, hidden = submit(slurm, runs, "x", "--partition=urgent", "--nodes=99", "--dry-run")
    finally:
        slurm.admin("scontrol", "update", "PartitionName=urgent", "Hidden=NO")
    assert code == 2
    first, second = told.splitlines()
    assert first.endswith("Slurm lists no partition nope; there are: batch")
    # Who names a hidden partition gets the check of its limits.
    assert "no partition" not in hidden
    assert "in partition urgent, 4" in hidden
    assert second.startswith("hpcrun: sbatch refused: ")
    assert "nvalid partition" in second
    assert not (runs / "nowhere").exists()


def test_without_a_controller_one_line_refuses(slurm: SlurmCluster, runs: Path) -> None:
    slurm.stop_daemon("slurmctld")
    try:
        code, _, told = submit(slurm, runs, "impatient")
    finally:
        slurm.start_daemon("slurmctld")
    assert (code, told.count("\n")) == (2, 1)
    assert not (runs / "impatient").exists()


def processes(slurm: SlurmCluster, host: str, name: str) -> list[psutil.Process]:
    """Return the programs of that name on ``host``."""
    found = []
    for pid in slurm.processes(host):
        # A process may end between the listing and the read.
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if process.name() == name:
                found.append(process)
    return found


def asks(slurm: SlurmCluster) -> bool:
    """Return True if an sbatch on the login host has connected to a controller that does not read."""
    for process in processes(slurm, "login", "sbatch"):
        # The connections of its network namespace; 01 is TCP_ESTABLISHED (proc(5)).
        talks = Path(f"/proc/{process.pid}/net/tcp").read_text().splitlines()[1:]
        if any(talk.split()[3] == "01" for talk in talks):
            return True
    return False


@pytest.fixture
def without_scancel(slurm: SlurmCluster) -> dict[str, str]:
    """Return an environment in which a job can be submitted but not canceled."""
    folder = slurm.shared / "without-scancel"
    slurm.run(["mkdir", str(folder)])
    programs = [str(shutil.which(name, path=slurm.path)) for name in NEEDED]
    slurm.run(["ln", "-s", *programs, str(folder)])
    return {"PATH": str(folder)}


@pytest.mark.parametrize(
    ("key", "cancels"),
    [
        (signal.SIGINT, True),
        (signal.SIGINT, False),
        (signal.SIGHUP, True),
    ],
)
def test_a_signal_during_sbatch_leaves_no_unrecorded_job(
    slurm: SlurmCluster,
    runs: Path,
    key: signal.Signals,
    cancels: bool,
    request: pytest.FixtureRequest,
) -> None:
    env = None if cancels else request.getfixturevalue("without_scancel")
    (controller,) = processes(slurm, "ctl", "slurmctld")
    run = RunDirectory(runs / f"between-{key.name}-{cancels}")
    before = {job["jobid"] for job in slurm.squeue()}
    # A separate session: a terminal signals all foreground processes of its session.
    command = ["setsid", *line(slurm, runs, run.name)]
    controller.suspend()
    try:
        submitting = slurm.popen(command, cwd=slurm.shared, env=env)
        slurm.wait_until(lambda: asks(slurm))
        (asking,) = processes(slurm, "login", "sbatch")
        foreground = os.getpgid(asking.pid)
        for _ in range(3):
            os.killpg(foreground, key)
    finally:
        controller.resume()
    _, told = submitting.communicate(timeout=PATIENCE)
    added = [job for job in slurm.squeue() if job["jobid"] not in before]
    if key == signal.SIGINT and cancels:
        assert told.splitlines()[-1] == "hpcrun: interrupted: nothing was submitted"
        assert not run.path.exists()
        assert [job["state"] for job in added] in ([], ["CANCELLED"])
        return
    code = 128 + (key if key == signal.SIGHUP else signal.SIGINT)
    assert submitting.returncode in (-key, code), told
    (submitted,) = jobs.events(run, "submitted")
    assert [submitted.attempt and submitted.attempt.job] == [job["jobid"] for job in added]
    if key != signal.SIGHUP:
        stays = f"interrupted: job {added[0]['jobid']} is submitted and stays"
        assert f"{stays}; `hpcrun cancel" in told


def test_a_stuck_sbatch_ends_by_the_quit_signal_only(slurm: SlurmCluster, runs: Path) -> None:
    (controller,) = processes(slurm, "ctl", "slurmctld")
    controller.suspend()
    try:
        submitting = slurm.popen(["setsid", *line(slurm, runs, "stuck")], cwd=slurm.shared)
        slurm.wait_until(lambda: asks(slurm))
        foreground = os.getpgid(processes(slurm, "login", "sbatch")[0].pid)
        os.killpg(foreground, signal.SIGINT)
        assert submitting.poll() is None
        os.killpg(foreground, signal.SIGQUIT)
        submitting.wait(timeout=PATIENCE)
        slurm.wait_until(lambda: not processes(slurm, "login", "sbatch"))
    finally:
        controller.resume()
    assert submitting.returncode in (-signal.SIGQUIT, 128 + signal.SIGQUIT)
    # The same command works afterwards, unless the request had arrived.
    code, _, told = submit(slurm, runs, "stuck")
    assert code == 0 or "has it already" in told, told


def test_an_sbatch_without_an_answer_is_refused(slurm: SlurmCluster, runs: Path) -> None:
    (controller,) = processes(slurm, "ctl", "slurmctld")
    run = RunDirectory(runs / "unheard")
    controller.suspend()
    try:
        submitting = slurm.popen(line(slurm, runs, run.name), cwd=slurm.shared)
        slurm.wait_until(lambda: asks(slurm))
        # The timeout of sbatch: MessageTimeout of slurm.conf.
        _, told = submitting.communicate(timeout=PATIENCE)
    finally:
        controller.resume()
    assert submitting.returncode == 2
    assert "sbatch got no answer" in told
    slurm.wait_until(lambda: any(job["name"] == run.name for job in slurm.squeue()))
    (made,) = (job for job in slurm.squeue() if job["name"] == run.name)
    assert slurm.wait_state(made["jobid"]) == "COMPLETED"
