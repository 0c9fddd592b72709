"""The progress that a script reports, from the call to the run directory."""

import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

import hpcrun
from hpcrun.ranks.script import end as script_end
from hpcrun.ranks.script.end import ProgressWatch
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.files import read_lines
from hpcrun.run.reports import VARIABLE, newest_report, published
from tests.support.journal import read_events, record_event

FIRST = Attempt("7", 0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create(tmp_path / "a", "{}\n", {})
    run.attempt_logs(FIRST).mkdir(parents=True)
    return run


def reports(monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    monkeypatch.setenv(VARIABLE, str(folder))


def test_outside_hpcrun_a_report_does_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.chdir(tmp_path)
    hpcrun.report(step=3, saved=True)
    assert not list(tmp_path.iterdir())


def test_the_newest_report_of_all_processes_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports(monkeypatch, tmp_path)
    hpcrun.report(10, saved=True)
    hpcrun.report(14)
    # A launcher below the rank has several workers.
    code = "import hpcrun; hpcrun.report(step=13, saved=12); hpcrun.report(step=13)"
    subprocess.run([sys.executable, "-c", code], check=True)
    found = newest_report(tmp_path)
    assert (found.step, found.saved) == (14, 12)
    assert sorted(path.name[:7] for path in tmp_path.iterdir()) == ["report-", "report-"]


def test_a_report_imports_nothing_slow(tmp_path: Path) -> None:
    code = (
        "import hpcrun, sys; hpcrun.report(step=1); "
        "print([name for name in ('torch', 'numpy', 'pydantic', 'yaml') if name in sys.modules])"
    )
    environ = os.environ | {VARIABLE: str(tmp_path)}
    assert subprocess.check_output([sys.executable, "-c", code], env=environ) == b"[]\n"
    assert newest_report(tmp_path).step == 1


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        ({"saved": True}, ValueError),
        ({"step": -1}, ValueError),
        ({"step": 1.5}, TypeError),
        ({"step": "7"}, TypeError),
        ({"loss": 1.0}, ValueError),
        ({"step": 1, "loss": "1.0"}, TypeError),
        ({"step": 1, "loss": None}, TypeError),
        ({"step": 1, "loss": [1.0]}, TypeError),
        ({"step": 1, "time": 1.0}, ValueError),
        ({"step": 1, "restart": 0}, ValueError),
    ],
)
def test_a_wrong_report_is_refused_also_outside_hpcrun(
    given: dict[str, object], kind: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(kind):
        hpcrun.report(**given)  # type: ignore[arg-type]


def test_a_report_that_cannot_be_written_does_not_raise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reports(monkeypatch, tmp_path / "gone")
    hpcrun.report(1)
    hpcrun.report(2)
    assert capfd.readouterr().err.count("the report is not written") == 1


def test_metrics_of_rank_0_are_lines_of_the_run(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reports(monkeypatch, tmp_path)
    monkeypatch.setenv("HPCRUN_RUN", str(run.path))
    monkeypatch.setenv("SLURM_RESTART_COUNT", "2")
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        others: dict[str, Any] = {"val/top-1": 3, "lr": math.nan}
        hpcrun.report(step=10, loss=Fraction(1, 2), **others)
    hpcrun.report(step=11)
    (line,) = read_lines(run.metrics)
    assert line.pop("time") <= time.time()
    columns = {"step": 10, "restart": 2, "in_place": 0}
    assert line == {**columns, "loss": 0.5, "val/top-1": 3, "lr": None}


def test_only_rank_0_publishes_immediately_and_announces_each_save(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProgressWatch(run, FIRST, 3) as progress:
        reports(monkeypatch, Path(progress.variables[VARIABLE]))
        hpcrun.report(5, saved=True)
        progress.look(last=True)
        assert (progress.step, shown(run)) == (5, (None, None))
    with ProgressWatch(run, FIRST, 0, every=0.0) as progress:
        reports(monkeypatch, Path(progress.variables[VARIABLE]))
        hpcrun.report(5)
        progress.look()
        hpcrun.report(6, saved=True)
        progress.look()
        hpcrun.report(7)
        # Steps without a save wait a little, because each write loads the file server.
        progress.look()
        assert shown(run) == (6, 6)
        progress.look(last=True)
        assert (shown(run), progress.step) == ((7, 6), 7)
    told = [(event.tag, event.step) for event in read_events(run)]
    assert told == [("stepped", 5), ("saved", 6)]
    assert not Path(progress.variables[VARIABLE]).exists()


def test_a_new_rank_removes_the_folder_of_a_killed_rank(
    run: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_end, "memory_folder", lambda: tmp_path)
    living, killed = ProgressWatch(run, FIRST, 0), ProgressWatch(run, FIRST, 1)
    with living:
        child = os.fork()
        if child == 0:
            killed.__enter__()
            os.kill(os.getpid(), signal.SIGKILL)
        os.waitpid(child, 0)
        assert len(list(tmp_path.glob("hpcrun-*"))) == 2
        with ProgressWatch(run, FIRST, 1) as later:
            kept = {str(path) for path in tmp_path.glob("hpcrun-*")}
            assert kept == {living.variables[VARIABLE], later.variables[VARIABLE]}
    assert list(tmp_path.glob("*hpcrun-*")) == []


def deep(place: Path) -> None:
    """Make more levels than Python's rmtree can remove."""
    before = os.open(".", os.O_RDONLY)
    place.mkdir()
    os.chdir(place)
    for _ in range(1500):
        os.mkdir("d")  # noqa: PTH102  (relative to the deepest folder)
        os.chdir("d")
    os.fchdir(before)
    os.close(before)


def of_another_user(place: Path) -> None:
    place.mkdir(mode=0o777)
    place.chmod(0o777)
    (place / "file").touch()
    os.chown(place, 65534, -1)


def deep_of_another_user(place: Path) -> None:
    deep(place)
    os.chown(place, 65534, -1)


@pytest.mark.parametrize(
    "make",
    [
        deep,
        deep_of_another_user,
        of_another_user,
        Path.touch,
        os.mkfifo,
        lambda place: place.symlink_to("/etc"),
        lambda place: place.symlink_to(place),
    ],
)
def test_strange_files_in_the_nodes_memory_disturb_no_script(
    make: Callable[[Path], object],
    run: RunDirectory,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if make in (of_another_user, deep_of_another_user) and os.geteuid() != 0:
        pytest.skip("only root can make files of another user")
    monkeypatch.setattr(script_end, "memory_folder", lambda: tmp_path)
    strange = tmp_path / "hpcrun-progress-evil"
    make(strange)
    inside = strange.stat().st_mtime_ns if make is of_another_user else None
    with ProgressWatch(run, FIRST, 0) as progress:
        assert Path(progress.variables[VARIABLE]).is_dir()
    if inside is not None:
        assert (strange / "file").exists()
        assert strange.stat().st_mtime_ns == inside
    assert os.path.lexists(strange)
    subprocess.run(["rm", "-rf", strange], check=True)


def test_a_save_counts_for_the_stop_only_after_the_signal(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ProgressWatch(run, FIRST, 0) as progress:
        reports(monkeypatch, Path(progress.variables[VARIABLE]))
        hpcrun.report(5, saved=True)
        progress.stop_received()
        progress.look(last=True)
        assert progress.saved_since_stop is None
        hpcrun.report(6, saved=True)
        progress.stop_received()
        progress.look(last=True)
        assert progress.saved_since_stop == 6


def test_an_attempt_begins_at_the_newest_reported_save(run: RunDirectory) -> None:
    record_event(run, "submitted", attempt=FIRST, executor="local")
    record_event(run, "opened", attempt=FIRST)
    record_event(run, "saved", attempt=FIRST, step=40)
    ProgressWatch(run, Attempt("7", 1), 0).note_start()
    assert read_events(run)[-1].step == 40


def shown(run: RunDirectory) -> tuple[int | None, int | None]:
    """Return the step and the save that the run directory shows."""
    found = published(run.attempt_logs(FIRST))
    return found.step, found.saved
