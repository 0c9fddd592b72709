"""Progress lines of training."""

import sys
from pathlib import Path

import pytest

from hpcrun.run import progress_lines
from hpcrun.run.progress_lines import StepLines, validation_line
from hpcrun.run.streams import copied_to


class Clock:
    """A clock that a test moves."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(progress_lines, "time", made)
    return made


def test_step_lines_come_first_then_every_ten_seconds(clock: Clock) -> None:
    lines = StepLines(100)
    lines.begin(10, 1000.0)
    # The first step is no measure: its time includes the start of the loop.
    assert lines.line(20, 1005.0, {"loss": "1.5"}) == "step 20/100: loss 1.5, ETA 00:40"
    clock.now += 9.9
    assert lines.line(30, 1014.9, {"loss": "1.4"}) is None
    clock.now += 0.1
    assert lines.line(40, 1015.0, {"loss": "1.3"}) == "step 40/100: loss 1.3, ETA 00:30"
    assert lines.line(100, 1045.0, {"loss": "1.2"}) == "step 100/100: loss 1.2, ETA 00:00"


def test_a_line_of_a_script_has_no_last_step(clock: Clock) -> None:
    lines = StepLines(None)
    assert lines.line(1, 1000.0, {"loss": "1.5"}) == "step 1: loss 1.5"
    clock.now += 10.0
    assert lines.line(20, 1010.0, {"loss": "1.4"}) == "step 20: loss 1.4"


def test_a_validation_with_a_nan_loss_has_a_line() -> None:
    line = {"step": 30, "validation_loss": None}
    assert validation_line(line) == "step 30: validation loss nan"
    assert validation_line({"step": 30, "loss": 1.0}) is None


def test_printed_text_goes_to_the_terminal_and_to_the_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "logs" / "rank-00000.log"
    for number in range(2):
        with copied_to(log):
            print("step", number, flush=True)
            print("trouble", file=sys.stderr)
    print("after")
    assert log.read_text() == "step 0\ntrouble\nstep 1\ntrouble\n"
    assert capsys.readouterr() == ("step 0\nstep 1\nafter\n", "trouble\ntrouble\n")


def test_a_log_that_cannot_be_opened_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").touch()
    with copied_to(tmp_path / "logs" / "rank-00000.log"):
        print("step 1")
    told = capsys.readouterr()
    assert told.out == "step 1\n"
    assert "so this log is lost: " in told.err
