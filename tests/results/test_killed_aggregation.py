"""An aggregation that is killed leaves the old file or the new one."""

import os
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from hpcrun.results.collect.aggregate import RunSource, aggregate
from hpcrun.results.collect.run_reader import find_runs
from hpcrun.results.store import Draft
from hpcrun.run.files import append_line
from tests.results.conftest import MakeRun

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("where", ["copy", "put", "finish"])
def test_killed_at_each_step(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    run = make_run("r", [1.0, 2.0])
    make_run("s", [1.0])
    output = tmp_path / "results.h5"
    sources = RunSource(find_runs([str(tmp_path / "runs")], tmp_path))
    aggregate(sources, output, processes=0)
    before = output.read_bytes()
    append_line(run.metrics, {"step": 30, "loss": 1.0})
    child = os.fork()
    if not child:
        monkeypatch.setattr(Draft, where, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        aggregate(sources, output, processes=0)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert output.read_bytes() == before
    assert any(path.name.endswith(".tmp") for path in tmp_path.iterdir())
    assert aggregate(sources, output, processes=0).rows == 4
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "results.h5"}


def test_a_full_disk_leaves_the_old_file(
    tmp_path: Path, make_run: MakeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run("r", [1.0])
    output = tmp_path / "results.h5"
    sources = RunSource(find_runs([str(tmp_path / "runs")], tmp_path))
    aggregate(sources, output, processes=0)
    before = output.read_bytes()
    append_line(run.metrics, {"step": 30, "loss": 1.0})

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Draft, "put", full)
    with pytest.raises(OSError, match="No space"):
        aggregate(sources, output, processes=0)
    assert output.read_bytes() == before
    assert {path.name for path in tmp_path.iterdir()} == {"runs", "results.h5"}


def test_ctrl_c_is_one_line(tmp_path: Path, make_run: MakeRun) -> None:
    for number in range(9):
        make_run(f"r{number}", [1.0])
    words = ["aggregate", "runs", "-o", "results.h5", "--processes", "2"]
    process = subprocess.Popen(
        [sys.executable, "-m", "hpcrun", *words],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    while process.poll() is None and not (tmp_path / ".results.h5.lock").exists():
        time.sleep(0.005)
    # The readers import numpy now.
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    assert process.communicate()[1] == "hpcrun: interrupted\n"
    assert process.returncode == 130
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}


def test_ctrl_c_in_a_callback_of_h5py_is_not_lost(tmp_path: Path, make_run: MakeRun) -> None:
    """Python drops an exception in a callback of a weak reference, which h5py has for each object."""
    for number in range(3):
        make_run(f"r{number}", [1.0])
    sources = RunSource(find_runs([str(tmp_path / "runs")], tmp_path))

    def press(done: int, total: int) -> None:
        key = RunSource([])
        reference = weakref.ref(key, lambda _: os.kill(os.getpid(), signal.SIGINT))
        del key
        assert (reference(), done) == (None, 1)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        aggregate(sources, tmp_path / "results.h5", processes=0, progress=press)
    assert signal.getsignal(signal.SIGINT) is before
    assert {path.name for path in tmp_path.iterdir()} == {"runs"}
