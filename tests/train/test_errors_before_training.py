"""A mistake before the first step ends the run; an error of a node does not."""

import errno
import os
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from hpcrun.config import Config
from hpcrun.diagnose.causes import first_cause
from hpcrun.errors import (
    ErrorOnAllRanks,
    NotTrainable,
    PrintedByRankZero,
    UserError,
    error_on_all_ranks,
    is_mistake,
)
from hpcrun.job.cause_table import classify, evidence_of
from hpcrun.job.scheduler_view import NO_ENDING
from hpcrun.ranks import collective
from hpcrun.ranks.collective import End, Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import NoSharedInterface
from hpcrun.ranks.signals import StopFlag
from hpcrun.run.directory import create
from hpcrun.run.endings import read_failures, record_failure
from hpcrun.run.events import Attempt, Cause, read_events
from hpcrun.train import environment
from hpcrun.train.data.batches import require_trainable
from hpcrun.train.data.batching import Batching
from hpcrun.train.entry import note_refusal, run_rank
from hpcrun.train.environment import resolve_interface


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


def test_a_mistake_is_bad_input_with_kind_and_place(tmp_path: Path) -> None:
    try:
        raise no_such("/data/x")
    except OSError as error:
        record_failure(tmp_path, 1, error, None, "n1", bad_input=True)
    found = first_cause(read_failures(tmp_path), [])
    assert found is not None
    assert found.bad_input
    assert found.line.startswith("rank 1 on n1: FileNotFoundError: [Errno 2] No such file")
    assert f" at {__file__}:" in found.line
    cause, line = classify(evidence_of([], Attempt("1", 0), 1, NO_ENDING, found))
    assert (cause, line) == (Cause.BAD_INPUT, found.line)


def test_a_data_loader_is_refused_with_its_remedy() -> None:
    loader = DataLoader(TensorDataset(torch.zeros(4)))
    with pytest.raises(UserError, match=r"gave a DataLoader; return its dataset, .*batch_size"):
        require_trainable(loader, 1, 0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="set cannot return a sample by index; give it __getitem__"):
        require_trainable({1, 2}, 1, 0)  # type: ignore[arg-type]


def test_a_step_of_many_epochs_is_announced() -> None:
    lines = list(Batching(1_000_000, 1, epoch=2000).lines(10))
    assert lines[-1].startswith("each step takes 500 epochs (train.batch_size=1000000): ")
    assert not any("each step takes" in line for line in Batching(32, 1, epoch=20).lines(10))


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
    (failure,) = read_failures(run.attempt_logs("7", 0))
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


@pytest.mark.parametrize(("worst", "told"), [("n3", "n3"), (None, "n1")])
def test_without_a_common_interface_the_worst_connected_node_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worst: str | None, told: str
) -> None:
    def refuses(*_: object) -> str:
        raise NoSharedInterface("no interface", worst)

    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    monkeypatch.setattr(environment, "shared_interface", refuses)
    run, attempt = create(tmp_path / "a", "x", {}), Attempt("7", 0)
    config = Config.model_validate({"train": {"batch_size": 64}, "job": {"interface": "auto"}})
    place = {"world_size": 2, "num_nodes": 2, "num_gpus_per_node": 1, "launch_method": "slurm"}
    for rank, kind in enumerate((ErrorOnAllRanks, PrintedByRankZero)):
        here = {"rank": rank, "node_rank": rank, "local_rank": 0}
        with pytest.raises(kind) as found:
            resolve_interface(config, run, attempt, DistributedConfig.model_validate(place | here))
        if rank == 0:
            note_refusal(run, attempt, found.value)
    (event,) = read_events(run)
    fields = event.fields
    assert (fields["host"], fields["certain"]) == (told, False)


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
