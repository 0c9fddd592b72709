"""What a script's rank takes its end for."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.lifecycle import script
from hpcrun.lifecycle.script import _own_code, _Watch
from hpcrun.lifecycle.signals import StopFlag, StopReason
from hpcrun.run import owner
from hpcrun.run.directory import create
from hpcrun.run.events import Attempt, Event, read_events
from hpcrun.run.owner import OwnerLooks, claim
from tests import jobs


def test_a_script_that_ends_well_on_a_signal_which_its_rank_hears_later_was_told_to_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "_LATE_SIGNAL", 60.0)
    run, flag = create(tmp_path / "a", "{}\n", {}), StopFlag()
    with subprocess.Popen(["true"]) as child:
        watch = _Watch(child, run, Attempt("7", 0), flag, DistributedConfig())
        threading.Timer(0.3, flag._remember, (signal.SIGUSR2, None)).start()
        assert watch.wait() == 0
    assert flag.reason is StopReason.WARNING


def test_a_script_outlives_an_owner_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OwnerLooks, "SHORTEST", 0.0)
    run, flag = create(tmp_path / "a", "{}\n", {}), StopFlag()
    run.owner.mkdir()
    with subprocess.Popen(["sleep", "1"]) as child:
        assert _Watch(child, run, Attempt("7", 0), flag, DistributedConfig()).wait() == 0
    assert capfd.readouterr().err.count("owner.json cannot be read now") == 1


@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_ends_when_another_process_of_the_same_number_has_the_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    rank: int,
) -> None:
    monkeypatch.setattr(OwnerLooks, "SHORTEST", 0.1)
    run, attempt = create(tmp_path / "a", "{}\n", {}), Attempt("7", 0)
    claim(run, attempt)

    def taken_over() -> None:
        monkeypatch.setattr(owner, "INCARNATION", "another")
        claim(run, attempt)

    with subprocess.Popen(["sleep", "60"]) as child:
        watch = _Watch(child, run, attempt, StopFlag(), DistributedConfig(rank=rank, world_size=2))
        timer = threading.Timer(1.5, taken_over)
        timer.start()
        assert watch.wait() == -signal.SIGKILL
        timer.join()
    assert "hpcrun: 7-0 (rank 0 on " in capfd.readouterr().err


def test_a_script_whose_run_another_attempt_has_taken_over_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(OwnerLooks, "SHORTEST", 0.1)
    run, first = create(tmp_path / "a", "{}\n", {}), Attempt("7", 0)
    claim(run, first)
    with subprocess.Popen(["sleep", "60"]) as child:
        threading.Timer(1.0, claim, (run, Attempt("7", 1))).start()
        watch = _Watch(child, run, first, StopFlag(), DistributedConfig())
        assert watch.wait() == -signal.SIGKILL
    assert "hpcrun: 7-1 (rank 0 on " in capfd.readouterr().err


@pytest.mark.parametrize(("ranks", "pause"), [(1, 5.0), (8, 5.0), (500, 5.0), (8192, 81.92)])
def test_many_ranks_together_look_for_a_new_owner_a_hundred_times_a_second_at_most(
    ranks: int, pause: float
) -> None:
    looks = [OwnerLooks(rank, ranks) for rank in range(ranks)]
    assert all(one.pause == pause for one in looks)
    # Every rank looks at its start: a script may be an orphan from then on.
    assert all(one.due(0.0) for one in looks)
    counts = [sum(one.due(float(second)) for one in looks) for second in range(1, 200)]
    assert max(counts) <= 101
    assert abs(sum(counts) - ranks * 199 / pause) <= ranks


def test_a_script_that_was_suspended_is_told_in_the_log_of_events(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    code = WATCHED.format(path=str(run.path))
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"waits\n"
        # Stopped before its first wait, the rank would notice nothing.
        time.sleep(1.0)
        rank.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        rank.send_signal(signal.SIGCONT)
        # The script ends when it is told, however long the rank takes to notice.
        jobs.wait_for(lambda: any(suspended_for(event) > 4.5 for event in read_events(run)))
        rank.stdin.close()
        assert rank.wait(jobs.PATIENCE) == 0
    assert all(event.attempt == Attempt("7", 0) for event in read_events(run))


def suspended_for(event: Event) -> float:
    """Seconds of a suspension; a machine that starves the rank makes it notice short ones too."""
    return float(event.fields["seconds"]) if event.what == "suspended" else 0.0


WATCHED = """
import subprocess
from pathlib import Path
from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.lifecycle.script import _Watch
from hpcrun.lifecycle.signals import StopFlag
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
child = subprocess.Popen(["cat"])
print("waits", flush=True)
run = RunDirectory(Path("{path}"))
_Watch(child, run, Attempt("7", 0), StopFlag(), DistributedConfig()).wait()
"""


@pytest.mark.parametrize(
    ("code", "first", "later"),
    [(0, 0, 0), (1, 1, 1), (2, 2, 1), (74, 1, 1), (75, 1, 1), (143, 143, 143)],
)
def test_a_programs_exit_codes_are_not_taken_for_ours(code: int, first: int, later: int) -> None:
    assert _own_code(code, worked=False) == first
    assert _own_code(code, worked=True) == later
