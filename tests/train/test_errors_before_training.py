"""A mistake before the first step ends the run; an error of a node does not."""

import errno
import os
from pathlib import Path

import pytest

from hpcrun.errors import (
    ErrorOnAllRanks,
    NotTrainable,
    UserError,
    error_on_all_ranks,
    is_mistake,
)
from hpcrun.ranks import collective
from hpcrun.ranks.collective import End, Ranks
from hpcrun.ranks.signals import StopFlag
from hpcrun.run.directory import create
from hpcrun.run.endings import read_failures
from hpcrun.run.events import Attempt, read_events
from hpcrun.train.entry import note_refusal, run_rank


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
    fields = [event.fields for event in read_events(run)]
    assert [(one["host"], one["certain"]) for one in fields] == [
        ("n1", False),
        ("n1", True),
        ("n2", False),
        ("n1", False),
        ("n1", True),
    ]
