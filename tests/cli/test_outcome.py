"""The end of a run on the screen."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from hpcrun import exit_codes
from hpcrun.cli import output
from hpcrun.cli.follow import Pace, follow
from hpcrun.cli.output import print_end, print_result
from hpcrun.config import Config
from hpcrun.errors import PeerFailed, PlannedStop
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import Exit, record_exit, record_failure
from hpcrun.run.files import write_json
from tests.support.journal import record_event


def test_numbers_come_first_then_texts_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path)
    report = {"sample": "a\nb", "accuracy": 0.98765, "seen": 270, "confusions": [[10, 0], [2, 8]]}
    early = "at step 70: 5 validations without a better loss; the best was 0.2, at step 20"
    write_json(run.result, {"validation_loss": 0.25, "report": report, "stopped_early": early})
    print_result(run)
    assert capsys.readouterr().out.splitlines() == [
        "  accuracy         0.9877",
        "  seen             270",
        "  validation loss  0.2500",
        f"  stopped early    {early}",
        "  sample:",
        "    | a",
        "    | b",
        "  confusions:",
        "    | 10  0",
        "    |  2  8",
        f"  result           {run.result}",
    ]


# Step 45 has the loss of step 40, whose checkpoint is pruned.
@pytest.mark.parametrize("of", [40, 45, 50])
def test_the_best_and_the_last_figures_are_distinguished_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], of: int
) -> None:
    run, best = RunDirectory(tmp_path), {"step": 40, "validation_loss": 0.125}
    result = {"steps": 50, "validation_loss": 0.25, "best": best, "report_step": of}
    write_json(run.result, result | {"report": {"accuracy": 0.5}})
    print_result(run)
    mine = "; the figures above are of this step"
    assert capsys.readouterr().out.splitlines()[:-1] == [
        "  accuracy         0.5000",
        f"  validation loss  {'0.1250' if of < 50 else '0.2500'}",
        f"  best             step 40, validation loss 0.1250{mine if of < 50 else ''}",
        f"  last             step 50, validation loss 0.2500{mine if of == 50 else ''}",
    ]


def test_a_hang_is_reported_only_once_by_the_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, attempt = RunDirectory(tmp_path), Attempt("1", 0)
    logs = run.attempt_logs(Attempt("1", 0))
    logs.mkdir(parents=True)
    line = "no progress for 300 s in step 7: rank 1 on n1 does not answer"
    (logs / "rank-00000.log").write_text(
        f"hpcrun: starting at step 0\nhpcrun: {line}; stacks in x\n"
    )
    record_event(run, "submitted", executor="local", job="1")
    record_event(run, "opened", attempt=attempt)
    write_json(run.result, {"state": "failed", "cause": "hang", "reason": line})
    assert follow(run, Config(), stop_on_interrupt=False) == exit_codes.FAILED
    said = capsys.readouterr().out
    assert "starting at step 0" in said
    assert said.count("no progress for 300 s") == 1


def test_a_task_cannot_forge_a_line_of_ours(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, attempt = RunDirectory(tmp_path), Attempt("1", 0)
    logs = run.attempt_logs(Attempt("1", 0))
    forged = f"hpcrun: {run.name} is finished"
    record_event(run, "submitted", executor="local", job="1")
    record_event(run, "opened", attempt=attempt)
    logs.mkdir(parents=True)
    (logs / "rank-00000.log").write_text(f"{forged}\nx\r{forged}\n")
    _fail(logs, 0, ValueError(f"x\n{forged}"))
    write_json(run.result, {"state": "failed", "cause": "crash", "reason": f"x\n{forged}"})
    for config in (Config(), Config(command=["x"])):
        assert follow(run, config, stop_on_interrupt=False) == exit_codes.FAILED
        told = capsys.readouterr().out.splitlines()
        assert forged not in told
        assert f"rank 0: {run.name} is finished" in told
        assert f"    | {forged}" in told


def test_the_time_that_is_left_follows_the_runs_own_clock() -> None:
    pace = Pace(100_000)
    # All of it is read together, long after it was written.
    pace.begin(0, 1000.0)
    assert pace.left(10, 1001.0) == "2:46:39"
    # Ten steps in ten seconds, nine of them for the first step, and then a hundred steps per second.
    pace.begin(0, 1000.0)
    pace.left(10, 1010.0)
    assert pace.left(1010, 1020.0) == "16:29"
    # A clock that was set back shows no rate.
    assert pace.left(1020, 900.0) is None
    assert Pace(10).left(5, 1.0) is None


def _fail(folder: Path, rank: int, error: Exception) -> None:
    try:
        raise error
    except Exception as raised:
        if isinstance(raised, PlannedStop):
            raised.__traceback__ = None
        record_failure(folder, rank, raised, 7)


@pytest.mark.parametrize(
    ("own", "shown"),
    [
        (None, 0),  # Killed, without a word.
        (ValueError("sample 12 has no label"), 1),
        (PlannedStop("gradients are not finite"), 0),
    ],
)
def test_a_rank_that_only_lost_its_peers_shows_no_traceback(
    own: Exception | None, shown: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, attempt = RunDirectory(tmp_path), Attempt("1", 0)
    folder = run.attempt_logs(Attempt("1", 0))
    record_event(run, "opened", attempt=attempt)
    write_json(run.result, {"state": "failed", "cause": "crash", "reason": "rank 1 began it"})
    folder.mkdir(parents=True)
    if own is None:
        record_exit(folder, Exit(1, "n0", 1.0, None, 9, False))
    _fail(folder, 0, PeerFailed("rank 1 says more"))
    if own is not None:
        _fail(folder, 1, own)
    assert print_end(run) == exit_codes.FAILED
    first, *evidence, last = capsys.readouterr().out.splitlines()
    assert first.endswith("failed: rank 1 began it")
    assert last == f"  logs  {folder}"
    assert [line.startswith("    | Traceback") for line in evidence].count(True) == shown
    assert not any("PeerFailed" in line for line in evidence)


def test_bad_input_hides_the_tracebacks_of_ranks_that_it_left(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run, folder = RunDirectory(tmp_path), RunDirectory(tmp_path).attempt_logs(Attempt("1", 0))
    record_event(run, "opened", attempt=Attempt("1", 0))
    write_json(run.result, {"state": "failed", "cause": "bad-input", "reason": "train.x: no"})
    _fail(folder, 1, RuntimeError("Connection closed by peer"))
    assert print_end(run) == exit_codes.BAD_INPUT
    assert capsys.readouterr().out.splitlines()[1:] == [f"  logs  {folder}"]


@pytest.mark.parametrize(
    ("last", "shown"),
    [("hpcrun.errors.UserError: loader: no", False), ("NameError: name 'x' is not defined", True)],
)
def test_a_refusal_in_a_script_is_a_line_without_traceback(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    last: str,
    shown: bool,
) -> None:
    run, trace = RunDirectory(tmp_path), f"Traceback (most recent call last):\n  File x\n{last}\n"
    record_event(run, "opened", attempt=Attempt("1", 0))
    write_json(run.result, {"state": "failed", "cause": "bad-input", "reason": last})
    found = SimpleNamespace(traceback=trace, bad_input=True, copy=None)
    monkeypatch.setattr(output, "first_cause", lambda *_: found)
    assert print_end(run) == exit_codes.BAD_INPUT
    assert ("    | Traceback" in capsys.readouterr().out) == shown


def test_a_run_that_was_deleted_is_not_to_be_continued(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = RunDirectory(tmp_path / "a")
    assert print_end(run) == exit_codes.FAILED
    assert capsys.readouterr().out == (
        f"hpcrun: a has ended: its run directory, {run.path}, was deleted\n"
    )
