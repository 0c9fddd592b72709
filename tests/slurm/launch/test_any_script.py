"""Support of the local cluster for any script, which need not know hpcrun."""

import json
import sys
from pathlib import Path

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch import jobs as run_jobs
from tests.support import jobs, scripts_of_others
from tests.support.jobs import outcome


def start(folder: Path, name: str, *command: str, options: tuple[str, ...] = ()) -> RunDirectory:
    """Submit ``command`` on two nodes of one rank and leave it running."""
    shape = ("--nodes", "2", "--gpus", "1", "--cpu", "--executor", "local", "--detach")
    more = ("--name", name, "job.requeue_delay=0.1", *options)
    done = jobs.hpcrun("submit", *shape, *more, "--", *command, cwd=folder)
    assert done.returncode == 0, done.stderr
    return RunDirectory(folder / "runs" / name)


def start_ddp(folder: Path, name: str, steps: int, pause: float) -> RunDirectory:
    """Submit the DDP script; its checkpoint goes to a folder named like the run."""
    (folder / "train.py").write_text(scripts_of_others.DDP)
    (folder / name).mkdir(exist_ok=True)
    return start(folder, name, sys.executable, "train.py", str(steps), name, str(pause))


def logs(run: RunDirectory, restart: int) -> list[str]:
    """Return the output of each rank in an attempt."""
    current = run_jobs.current_job(run)
    assert current is not None
    folder = run.attempt_logs(Attempt(current[1], restart))
    return [path.read_text() for path in sorted(folder.glob("rank-*.log"))]


def test_several_runs_are_canceled_together(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(scripts_of_others.UNAWARE)
    for name in ("one", "two"):
        start(tmp_path, name, sys.executable, "plain.py", str(tmp_path))
    unknown = jobs.hpcrun("cancel", "one", "nope", cwd=tmp_path)
    assert (unknown.returncode, unknown.stdout) == (2, "")
    done = jobs.hpcrun("cancel", "one", "two", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    lines = [line.split(": job")[0].split(" is ")[0] for line in done.stdout.splitlines()]
    # Both get their signal before the wait for the first.
    assert lines == [f"hpcrun: {name}" for name in ("one", "two", "one", "two")]
    again = jobs.hpcrun("cancel", "one", "two", cwd=tmp_path)
    assert again.returncode == 1
    assert again.stderr.count("is not running (cancelled)") == 2
    # hpcrun does not know the step of a script.
    assert "None" not in jobs.hpcrun("logs", "one", cwd=tmp_path).stdout


def test_a_script_without_handlers_starts_again_after_a_preemption(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text(scripts_of_others.UNAWARE)
    run = start(tmp_path, "plain", sys.executable, "plain.py", str(tmp_path))
    # More often than restarts.no_progress allows for a task: a script's progress is not seen.
    for count in range(1, 5):
        jobs.wait_for(lambda wanted=count: all_started(tmp_path, wanted))
        jobs.hpcrun("preempt", "plain", cwd=tmp_path)
    jobs.wait_for(lambda: all_started(tmp_path, 5))
    (tmp_path / "enough").touch()
    jobs.wait_for_end(run)
    assert outcome(run) == ("finished", ["preemption"] * 4 + ["finished"])
    # Only its earlier saves remain: time limits that kill it are counted.
    assert [event.killed for event in jobs.events(run, "stopped")] == [True] * 4
    assert len(jobs.events(run, "started")) == 5
    account = jobs.result(run)["goodput"]
    assert (account["productive"], account["ettr"]) == (0, None)
    assert account["running"] > 0


def all_started(folder: Path, times: int) -> bool:
    """Return whether every rank has run for that time."""
    counts = [path.read_text() for path in folder.glob("starts-*")]
    return len(counts) == 2 and all(count and int(count) >= times for count in counts)


def test_cancelling_a_script_lets_it_save_and_resume_continues_it(tmp_path: Path) -> None:
    run = start_ddp(tmp_path, "halted", 25, 0.1)
    jobs.wait_for(lambda: bool(logs(run, 0)) and "starts at" in logs(run, 0)[0])
    done = jobs.hpcrun("cancel", "halted", cwd=tmp_path)
    assert "halted is cancelled; " in done.stdout
    assert outcome(run) == ("cancelled", ["cancelled"])
    followed = jobs.hpcrun("resume", "halted", cwd=tmp_path)
    assert followed.returncode == 0, followed.stdout + followed.stderr
    assert "rank 0 is done" in followed.stdout
    assert "starts at step 0" not in followed.stdout


def test_a_program_below_a_wrapper_saves_at_the_warning(tmp_path: Path) -> None:
    (tmp_path / "saves.py").write_text(scripts_of_others.SAVES)
    (tmp_path / "wrap.sh").write_text(f"{sys.executable} saves.py\nexit $?\n")
    run = start(tmp_path, "wrapped", "bash", "wrap.sh", options=("job.warn_signal=USR1",))
    jobs.wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 2)
    done = jobs.hpcrun("preempt", "wrapped", cwd=tmp_path)
    assert "SIGUSR1 to all ranks; it is requeued after their end" in done.stdout, done.stderr
    jobs.wait_for_end(run)
    assert outcome(run) == ("finished", ["preemption", "finished"]), logs(run, 0)
    # bash died of the signal immediately, and its program had two more seconds.
    assert {path.name for path in tmp_path.glob("saved-*")} == {
        "saved-0-SIGUSR1",
        "saved-1-SIGUSR1",
    }
    (stopped,) = jobs.events(run, "stopped")
    assert (stopped.step, stopped.committed) == (7, True)
    assert not stopped.has("killed")
    assert jobs.events(run, "ended")[0].reason == "preemption: the script saved step 7"
    assert [event.step for event in jobs.events(run, "started")] == [None, 7]
    told = json.loads(jobs.hpcrun("status", "wrapped", "--json", cwd=tmp_path).stdout)
    assert (told["step"], told["committed"]) == (7, 7)


CRASHES = """\
[ "$RANK" = 1 ] || { echo "$HPCRUN_MEMORY_KEEPER" >> keys; python -c "$1"; }
case "$HPCRUN_RESTART-$RANK" in
    0-0) exit 3 ;;
    0-1) exec sleep 600 ;;
    1-*) exit 75 ;;
esac
"""


def test_a_crash_after_a_save_starts_again_in_place(tmp_path: Path) -> None:
    (tmp_path / "crashes.sh").write_text(CRASHES)
    saves = "import hpcrun; hpcrun.report(1, saved=True)"
    run = start(tmp_path, "again", "sh", "crashes.sh", saves)
    jobs.wait_for_end(run)
    assert outcome(run) == ("finished", ["crash", "continued", "finished"])
    attempts = [event.attempt for event in jobs.events(run, "opened") if event.attempt]
    assert [one.label for one in attempts] == ["0", "0.1", "1"]
    # The memory of the nodes survives the crash, and not the requeue.
    first, second, third = (tmp_path / "keys").read_text().split()
    assert first == second != third


def test_a_missing_program_is_reported_and_not_retried(
    tmp_path: Path,
) -> None:
    run = start(tmp_path, "absent", "no-such-program")
    jobs.wait_for_end(run)
    assert outcome(run) == ("failed", ["bad-input"])
    assert "no-such-program: cannot be started: No such file" in jobs.result(run)["reason"]
