"""An error of the run is final; an error of a node is not."""

import errno
import os
from pathlib import Path

import pytest

from hpcrun.checkpoint.storage.errors import ReadFailure
from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.diagnose.causes import blames_node, first_cause, is_cascade
from hpcrun.errors import NodeUnfit
from hpcrun.job import policy as exitcodes
from hpcrun.job.cause_table import classify, evidence_of
from hpcrun.job.scheduler_view import NO_ENDING
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.signals import STOP
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.endings import read_failures
from hpcrun.run.events import Attempt, Cause, read_events, record_event
from hpcrun.train.entry import run_attempt
from tests.train.forks import fork_ranks

CONFIG = resolve(
    [override_layer(["task=tests.train.faulty_tasks:Graded", "job.gpus=1", "job.cpu=true"])]
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
    assert code == (exitcodes.BAD_INPUT if cause is Cause.BAD_INPUT else exitcodes.FAILED)
    return cause


def unfit(run: RunDirectory, attempt: Attempt, monkeypatch: pytest.MonkeyPatch) -> Cause:
    return ended(run, attempt, UNFIT, monkeypatch, "hpcrun.train.entry.require_node")


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
