"""A mistake before the first step ends the run; an error of a node does not."""

import errno
import os
from pathlib import Path

import pytest

from hpcrun import exit_codes
from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.diagnose.causes import blames_node, first_cause
from hpcrun.errors import (
    ErrorOnAllRanks,
    NodeUnfit,
    NotTrainable,
    UserError,
    error_on_all_ranks,
)
from hpcrun.job.cause_table import classify, evidence_of
from hpcrun.job.scheduler_view import NO_ENDING
from hpcrun.ranks import collective
from hpcrun.ranks.collective import End, Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.signals import STOP, StopFlag
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.endings import is_cascade, read_failures
from hpcrun.run.failures.mistakes import is_mistake
from hpcrun.run.journal.events import Cause
from hpcrun.run.journal.opening import note_refusal
from hpcrun.storage.errors import ReadFailure
from hpcrun.worker import run_attempt, run_rank
from tests.support.journal import read_events, record_event
from tests.support.training.forks import fork_ranks


def no_such(path: str) -> OSError:
    return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)


@pytest.mark.parametrize(
    ("error", "mistake"),
    [
        (no_such("/data/imagenet/train.pt"), True),
        (PermissionError(errno.EACCES, "Permission denied", "/data/x"), True),
        (ModuleNotFoundError("No module named 'timm'"), True),
        (ImportError("cannot import name 'a' from 'b'"), True),
        (SyntaxError("invalid syntax"), True),
        (NameError("name 'x' is not defined"), True),
        (no_such("/dev/nvidia3"), False),
        (ImportError("libcudart.so.12: cannot open shared object file"), False),
        (OSError(errno.EIO, "Input/output error", "/data/x"), False),
        (RuntimeError("CUDA error"), False),
        (ValueError("x"), False),
    ],
)
def test_only_an_error_of_every_start_is_a_mistake(error: Exception, mistake: bool) -> None:
    assert is_mistake(error) == mistake


def test_a_rank_without_the_submission_folder_reports_its_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = create(tmp_path / "a", "task: probe:Probe\n", {"folder": "/not/on/this/node"})
    slurm = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "4"}
    place = {"SLURM_LOCALID": "0", "SLURM_NODEID": "1", "SLURM_TASKS_PER_NODE": "2(x2)"}
    hosts = {
        "SLURM_STEP_NODELIST": "n[1-2]",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_JOB_NUM_NODES": "2",
    }
    for name, value in {**slurm, **place, **hosts, "SLURMD_NODENAME": "n2"}.items():
        monkeypatch.setenv(name, value)
    assert run_rank(run.path, StopFlag()) == 2
    (failure,) = read_failures(run.attempt_logs(Attempt("7", 0)))
    assert (failure.rank, failure.host, failure.bad_input) == (2, "n2", True)
    assert failure.message.startswith("/not/on/this/node: the folder from which a was submitted")


@pytest.mark.parametrize(
    ("error", "theirs", "certain"),
    [
        (UserError("no data"), End("n2"), False),
        (UserError("no data"), End("n2", "no data", "no data"), False),
        (NotTrainable("no loss"), End("n2"), True),
        (UserError("no data"), End("n2", "no loss", "no loss", certain=True), True),
    ],
)
def test_connected_ranks_know_if_no_node_can_help(
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    theirs: End,
    certain: bool,
) -> None:
    def gather(words: list[object], mine: object, group: object) -> None:
        words[:] = [mine, theirs]

    def refuses() -> None:
        raise error

    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(collective.dist, "all_gather_object", gather)
    with pytest.raises(ErrorOnAllRanks) as found:
        Ranks(0, 2).together(refuses)
    assert found.value.certain == certain
    assert found.value.host == "n1"


def test_the_event_of_a_refusal_says_which_node_refuses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    run, attempt = create(tmp_path / "a", "x", {}), Attempt("7", 0)
    errors = [
        UserError("a"),
        NotTrainable("b"),
        ErrorOnAllRanks("c", certain=False, host="n2"),
        ErrorOnAllRanks("d", certain=False),
        error_on_all_ranks("e", 0),
    ]
    for error in errors:
        note_refusal(run, attempt, error)
    fields = [event.own for event in read_events(run)]
    assert [(one["host"], one["certain"]) for one in fields] == [
        ("n1", False),
        ("n1", True),
        ("n2", False),
        ("n1", False),
        ("n1", True),
    ]


CONFIG = resolve(
    [
        override_layer(
            ["task=tests.support.training.faulty_tasks:Graded", "job.gpus=1", "job.cpu=true"]
        )
    ]
)
MISSING = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/data/train.pt")
UNFIT = NodeUnfit("n5: Slurm gave this job 4 GPU(s) here, and none is visible")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create(tmp_path / "run", to_yaml(CONFIG), {"created": 1.0})


def ended(
    run: RunDirectory,
    attempt: Attempt,
    error: Exception,
    monkeypatch: pytest.MonkeyPatch,
    where: str = "hpcrun.train.session.train",
) -> Cause:
    """Return the cause of an attempt of one rank, in which ``where`` raises ``error``."""

    def fail(*_: object) -> int:
        raise error

    monkeypatch.setattr(where, fail)
    one = DistributedConfig(world_size=1, rank=0, local_rank=0)

    def play(_: int) -> None:
        raise SystemExit(run_attempt(run, attempt, CONFIG, one, STOP))

    (code,) = fork_ranks(1, play)
    found = first_cause(read_failures(run.attempt_logs(attempt)), [])
    cause, _ = classify(evidence_of(read_events(run), attempt, code, NO_ENDING, found))
    assert code == (exit_codes.BAD_INPUT if cause is Cause.BAD_INPUT else exit_codes.FAILED)
    return cause


def unfit(run: RunDirectory, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> Cause:
    return ended(run, attempt, UNFIT, monkeypatch, "hpcrun.train.environment.require_node")


def trained(run: RunDirectory, attempt: Attempt) -> None:
    record_event(run, "opened", attempt=attempt)
    record_event(run, "started", attempt=attempt, step=0)


@pytest.mark.parametrize(("restart", "cause"), [(0, Cause.BAD_INPUT), (1, Cause.CRASH)])
def test_only_a_first_start_without_gpus_is_bad_input(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, restart: int, cause: Cause
) -> None:
    assert unfit(run, Attempt("7", restart), monkeypatch) is cause


def test_a_node_without_gpus_does_not_end_a_training(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(run, Attempt("6", 0))
    assert unfit(run, Attempt("7", 0), monkeypatch) is Cause.CRASH


def test_a_mistake_before_the_first_step_is_bad_input(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(run, Attempt("7", 0), MISSING, monkeypatch) is Cause.BAD_INPUT


@pytest.mark.parametrize("before", [Attempt("7", 0), Attempt("6", 3)])
def test_a_mistake_after_training_is_not_bad_input(
    run: RunDirectory, before: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained(run, before)
    assert ended(run, Attempt("7", 1), MISSING, monkeypatch) is Cause.CRASH


def test_a_node_that_cannot_read_the_checkpoint_is_bad(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n5")
    text = "step 12: rank 0 (n5): /r/manifest.json: cannot be read: Connection reset by peer (ECONNRESET)"
    attempt = Attempt("7", 0)
    assert ended(run, attempt, ReadFailure(text, here=True), monkeypatch) is Cause.CRASH
    found = first_cause(read_failures(run.attempt_logs(Attempt("7", 0))), [])
    assert found is not None
    assert (found.line, found.host) == (f"rank 0 on n5: {text}", "n5")
    assert blames_node(found)


def test_a_peer_of_an_unreadable_checkpoint_is_no_cause(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = ReadFailure("step 12: rank 1 (n5): cannot be read", here=False)
    assert ended(run, Attempt("7", 0), error, monkeypatch) is Cause.CRASH
    (failure,) = read_failures(run.attempt_logs(Attempt("7", 0)))
    assert is_cascade(failure)
