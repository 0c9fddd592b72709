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
from hpcrun.run.events import Attempt, read_events
from hpcrun.run.owner import claim


def test_a_script_that_ends_well_on_a_signal_which_its_rank_hears_later_was_told_to_stop(
    tmp_path: Path,
) -> None:
    run, flag = create(tmp_path / "a", "{}\n", {}), StopFlag()
    with subprocess.Popen(["true"]) as child:
        watch = _Watch(child, run, Attempt("7", 0), flag, DistributedConfig())
        threading.Timer(0.3, flag._remember, (signal.SIGUSR2, None)).start()
        assert watch.wait() == 0
    assert flag.reason is StopReason.WARNING


def test_a_script_outlives_an_owner_file_that_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(script, "_OWNER_CHECK", 0.0)
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
    monkeypatch.setattr(script, "_OWNER_CHECK", 0.0)
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


def test_a_script_that_was_suspended_is_told_in_the_log_of_events(tmp_path: Path) -> None:
    run = create(tmp_path / "a", "{}\n", {})
    code = WATCHED.format(path=str(run.path))
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        assert rank.stdout.readline() == b"waits\n"
        time.sleep(0.5)
        rank.send_signal(signal.SIGSTOP)
        time.sleep(5.0)
        rank.send_signal(signal.SIGCONT)
        assert rank.wait(60) == 0
    (event,) = read_events(run)
    assert (event.what, event.attempt) == ("suspended", Attempt("7", 0))
    assert 4.5 < event.fields["seconds"] < 15


WATCHED = """
import subprocess
from pathlib import Path
from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.lifecycle import script
from hpcrun.lifecycle.script import _Watch
from hpcrun.lifecycle.signals import StopFlag
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
child = subprocess.Popen(["sleep", "7"])
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
