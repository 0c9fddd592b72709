"""A followed run on a real terminal: one bar, Ctrl-C, and a closed window."""

import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json
from tests.cli.conftest import tiny_config
from tests.cli.terminal import Terminal
from tests.support import jobs

_BAR = r"(\d+)%\|[^\r]*\| step (\d+)/4000, loss \d+\.\d{4}, samples/s [\d,]+, ETA \d\d:\d\d"


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Terminal]]:
    """Submit the run ``long`` (4000 steps, two ranks) from a new terminal, once per call."""
    opened: list[Terminal] = []

    def submit(**terminal: str | int) -> Terminal:
        settings = tiny_config(folder, train__steps=4000, model__pause=0.05)
        command = ["submit", "-c", "empty.yaml", "--name", "long", *settings]
        opened.append(Terminal(folder, *command, **terminal))  # type: ignore[arg-type]
        return opened[-1]

    yield submit
    for terminal in opened:
        terminal.kill()
    jobs.hpcrun("cancel", "--now", "long", cwd=folder)


def test_ctrl_c_saves_and_a_second_one_ends_the_run(
    folder: Path, start: Callable[..., Terminal]
) -> None:
    run = RunDirectory(folder / "runs" / "long")
    screen = start()
    screen.read_until(r"long: job \d+ on this machine, 2 ranks")
    screen.read_until(r"run directory +" + re.escape(str(run.path)))
    screen.read_until("Ctrl-C +saves and stops it")
    screen.read_until("2 ranks on the CPU over gloo")
    screen.read_until("starting at step 0, 2 ranks")
    bar = screen.read_until(_BAR)
    assert len(bar[0]) <= 80
    screen.press_ctrl_c()
    screen.read_until("saving a checkpoint, then stopping; Ctrl-C again ends it immediately")
    step = int(screen.read_until(r"long is cancelled at step (\d+); `hpcrun resume long`")[1])
    assert screen.end() == 75
    assert step >= int(bar[2])
    assert (read_json(run.result) or {})["state"] == "cancelled"
    assert (run.checkpoints / f"step-{step:09d}" / "manifest.json").is_file()

    # A terminal without a cursor gets lines instead of a bar.
    screen = start(term="dumb")
    screen.read_until(f"resumed from step {step}, 2 ranks")
    told = screen.read_until(r"\nstep (\d+)/4000: loss \d+\.\d{4}, samples/s [\d,]+")
    assert int(told[1]) > step
    with jobs.held(run, deaf=True):
        screen.press_ctrl_c()
        screen.read_until("saving a checkpoint")
        screen.press_ctrl_c()
        screen.read_until("ending it now; it continues from its last checkpoint")
    assert screen.end() == 75
    assert "\r" not in screen.text.replace("\r\n", "")


def test_ctrl_c_before_any_rank_trains_stops_the_run(
    folder: Path, start: Callable[..., Terminal]
) -> None:
    screen = start()
    screen.read_until("Ctrl-C +saves and stops it")
    screen.press_ctrl_c()
    screen.read_until("saving a checkpoint, then stopping")
    screen.read_until(r"long is cancelled( at step [01])?; `hpcrun resume long`")
    assert screen.end() == 75
    assert (read_json(RunDirectory(folder / "runs" / "long").result) or {})["state"] == "cancelled"


def test_a_closed_terminal_leaves_the_run_running(
    folder: Path, start: Callable[..., Terminal]
) -> None:
    screen = start(columns=140)
    assert 80 < len(screen.read_until(_BAR)[0]) <= 140
    screen.hang_up()
    run = RunDirectory(folder / "runs" / "long")
    seen = len(run.metrics.read_text().splitlines())
    jobs.wait_for(lambda: len(run.metrics.read_text().splitlines()) > seen + 3)
    again = jobs.hpcrun("logs", "-f", "long", "--rank", "2", cwd=folder)
    assert again.returncode == 2
    assert "--rank 2: long has ranks 0 to 1" in again.stderr
    watching = Terminal(folder, "logs", "-f", "long")
    watching.read_until("starting at step 0, 2 ranks")
    watching.press_ctrl_c()
    assert watching.end() == 130
    assert "long continues to run" in watching.text
    assert "running" in jobs.hpcrun("status", "long", cwd=folder).stdout


def test_into_a_pipe_go_plain_lines_and_the_result(finished: Path) -> None:
    output = (finished / "output.txt").read_text()
    assert "\r" not in output
    assert "\x1b" not in output
    assert re.search(r"^step 10/10: loss \d+\.\d{4}, samples/s [\d,]+, ETA 00:00$", output, re.M)
    assert re.search(r"^hpcrun: done is finished$", output, re.M)
    assert re.search(r"^  validation loss +\d+\.\d{4}$", output, re.M)
    assert re.search(rf"^  result +{finished}/runs/done/result\.json$", output, re.M)


@pytest.mark.parametrize("closed", [">&-", "<&- >&-", "<&- >&- 2>&-", "2>&-"])
def test_a_closed_stream_ends_no_command(closed: str, tmp_path: Path) -> None:
    line = f'"{sys.executable}" -m hpcrun help {closed}'
    done = subprocess.run(
        ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (closed == "2>&-")
