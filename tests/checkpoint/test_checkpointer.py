"""The public Checkpointer: the documented example killed and restarted, intervals, and refusals."""

import contextlib
import os
import shutil
import sys
import threading
import time
import warnings
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from hpcrun.checkpoint.checkpointer import Checkpointer
from hpcrun.checkpoint.folder import folder_engine, folder_store
from hpcrun.checkpoint.interval import EverySeconds, EverySteps, young
from hpcrun.checkpoint.sharded.commit import CommitProtocol
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.tree_group import new_control_group
from hpcrun.run.reports import VARIABLE, newest_report
from hpcrun.storage.errors import CheckpointError, CheckpointWarning
from hpcrun.train.step.trainer import AMPTrainer
from tests.support.on_ranks import ranks
from tests.support.pages import code_blocks
from tests.support.training.forks import fork_ranks

ROOT = Path(__file__).parents[2]


def example():
    page = (ROOT / "docs" / "checkpointing.md").read_text()
    return code_blocks(page, "python")[0]


def run(text, folder, attempt):
    """Run a script in ``folder`` and return its exit code and its output."""
    logs = folder / f"attempt-{attempt}"
    logs.mkdir(parents=True)

    def play(_):
        torch.set_num_threads(1)  # the threads of the parent do not exist in a forked child
        os.chdir(folder)
        with open(1, "w", closefd=False) as out, contextlib.redirect_stdout(out):
            exec(compile(text, "checkpointing.md", "exec"), {"__name__": "__main__"})

    (code,) = fork_ranks(1, play, logs)
    return code, (logs / "rank-0.log").read_text()


def test_the_example_ends_the_same_after_a_kill(tmp_path):
    calm, rough = tmp_path / "calm", tmp_path / "rough"
    code, undisturbed = run(example(), calm, 0)
    assert code == 0, undisturbed
    assert undisturbed.startswith("started at 0, best loss ")
    kill = "        if step == 33: ckpt.wait(); import os; os.kill(os.getpid(), 9)\n"
    deadly = example().replace("        x = torch", kill + "        x = torch")
    assert run(deadly, rough, 0)[0] == -9
    assert run(example(), rough, 1) == (0, undisturbed.replace("started at 0", "started at 30"))
    ends = [folder / "checkpoints" / "step-000000050" for folder in (calm, rough)]
    assert all(end.is_dir() for end in ends)


def parts():
    model = nn.Linear(2, 2)
    return {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1)}


def block(folder):
    """Block saves to a folder until the lock file is removed."""
    shutil.rmtree(folder)
    folder.write_text("in the way")


def test_a_failed_save_is_raised_on_leaving_and_can_repeat(tmp_path):
    place = tmp_path / "not" / "there"

    def train(ends):
        with Checkpointer(place, **parts()) as ckpt:
            block(place)
            ckpt.save(1)
            ends()

    # An exit code of 0 must mean that the save succeeded.
    for ends in (bool, sys.exit):
        with pytest.raises(CheckpointError, match="step 1 was not saved"):
            train(ends)
        place.unlink()
    ckpt = Checkpointer(place, **parts())
    block(place)
    ckpt.save(1)
    with pytest.raises(CheckpointError, match="step 1 was not saved"):
        ckpt.wait()
    place.unlink()
    ckpt.save(1)
    assert ckpt.wait().ok


@ranks(2)
def test_ranks_that_see_a_failure_late_start_the_same_saves(rank, tmp_path):
    place = tmp_path / "checkpoints"

    everybody = Ranks(rank, 2, new_control_group())
    assert folder_engine(folder_store(place), everybody, pinned=False).staging.ranks_on_host == 2
    ckpt = Checkpointer(place, **parts(), every=1)
    if rank == 0:
        block(place)
    heard, run = threading.Event(), CommitProtocol.run

    def late(protocol, job):
        outcome = run(protocol, job)
        assert rank == 0 or heard.wait(300)
        return outcome

    CommitProtocol.run = late  # in this forked process only
    assert ckpt.maybe_save(1)
    while rank == 0 and ckpt.saving:
        time.sleep(0.01)
    # As in the micro-batches of a step: rank 0 knows that the save has failed, rank 1 does not.
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        assert not ckpt.maybe_save(1)
    texts = [str(each.message) for each in told if each.category is CheckpointWarning]
    assert len(texts) == (rank == 0)
    assert all("step 1 was not saved: rank 0 (" in text for text in texts)
    heard.set()
    dist.barrier()
    if rank == 0:
        place.unlink()
    dist.barrier()
    ckpt.save(1)
    assert ckpt.wait().ok
    ckpt.save(1)
    assert not ckpt.maybe_save(1)
    # A state that one rank cannot save is reported as a failure, and other ranks do not hang.
    ckpt.extra["best"] = np.float32(1) if rank else 1.0
    ckpt.save(2)
    with pytest.raises(CheckpointError, match=r"step 2 was not saved: rank 1 .*numpy\.float32"):
        ckpt.wait()
    ckpt.extra["best"] = 2.0
    ckpt.save(2)
    assert ckpt.wait().ok

    def leave(step, end):
        with ckpt:
            ckpt.save(step)
            raise end

    for step, end in ((3, SystemExit(0)), (4, SystemExit(3)), (5, KeyError("a bug"))):
        with pytest.raises(type(end)):
            leave(step, end)
        assert (ckpt.outcome.ok, ckpt.outcome.step) == (True, step)
    # A rank that waits for another rank that never takes part ends anyway.
    coming = threading.Event()
    CommitProtocol.run = lambda *save: (coming.wait(300 * rank), run(*save))[1]
    ckpt.patience = 0.1
    given_up = pytest.warns(CheckpointWarning, match="step 6 was not saved within 0.1 s")
    with given_up, pytest.raises(KeyError):
        leave(6, KeyError("a bug"))
    dist.barrier()
    coming.set()
    assert ckpt.wait().step == 6


class Normed(nn.Module):
    """A batch norm in submodules named like DDP's prefix, and a cache that grows with use."""

    def __init__(self):
        super().__init__()
        self.module = nn.ModuleDict({"last": nn.BatchNorm1d(2)})
        self.last = nn.Linear(2, 1)
        self.register_buffer("cache", torch.zeros(1).expand(2), persistent=False)

    def forward(self, x):
        self.cache = torch.zeros(9)
        return self.last(self.module["last"](x))


def adam_of(model, steps):
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return {"model": model, "optimizer": optimizer}


def follows_sharded(folder, model):
    """Check that sharded values of ``extra`` come back in shards, and that a sharded optimizer is refused."""
    critic = nn.Linear(2, 2)
    fully_shard(critic)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    words = {"model": model, "optimizer": optimizer, "every": 0}
    means = [parameter.detach().clone() for parameter in critic.parameters()]
    ckpt = Checkpointer(folder, **words, extra={"critic": critic, "means": means})
    ckpt.save(1)
    ckpt.wait()
    before = [parameter.to_local().clone() for parameter in critic.parameters()]
    with torch.no_grad():
        critic.weight.zero_()
        means[0].zero_()
    ckpt.restore()
    for parameter, mean, local in zip(critic.parameters(), means, before, strict=True):
        assert torch.equal(parameter.to_local(), local)
        assert torch.equal(mean.to_local(), local)
    trained = Checkpointer(folder.with_name("trained"), **adam_of(critic, 1), every=0)
    trained.save(1)
    trained.wait()
    given = adam_of(critic, 0)
    critic(torch.ones(1, 2)).sum().backward()
    Checkpointer(folder.with_name("trained"), **given, every=0).restore()
    assert all(parameter.grad is not None for parameter in critic.parameters())
    given["optimizer"].step()
    assert [state["step"].item() for state in given["optimizer"].state.values()] == [2, 2]
    with pytest.raises(CheckpointError, match=r"extra\.adam: an optimizer of sharded parameters"):
        Checkpointer(folder, **words, extra={"adam": torch.optim.Adam(critic.parameters())})


@ranks(2)
def test_each_rank_gets_its_own_buffers_back_where_they_differ(rank, tmp_path):
    def build(rank):
        model = DistributedDataParallel(Normed(), broadcast_buffers=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        return model, Checkpointer(tmp_path / "checkpoints", model=model, optimizer=optimizer)

    model, ckpt = build(rank)  # releases the folder when the object is gone
    model(torch.full((4, 2), float(rank + 1))).sum().backward()
    ckpt.save(1)
    ckpt.wait()
    del ckpt
    after, ckpt = build(rank)
    assert ckpt.restore() == 1
    there, here = model.module.state_dict(), after.module.state_dict()
    assert all(torch.equal(here[name], value) for name, value in there.items())
    mean = here["module.last.running_mean"]
    assert mean[0] == pytest.approx(0.1 * (rank + 1))
    follows_sharded(tmp_path / "sharded", after)
    # Without DDP all tensors except buffers are compared.
    apart, same = tmp_path / "apart", nn.ModuleList([after.module, nn.Linear(1, 1)])
    with torch.no_grad():
        same[1].weight.fill_(rank)
    ckpt = Checkpointer(apart, model=same, optimizer=torch.optim.SGD(same.parameters()))
    ckpt.extra["seen"] = {1} if rank else 1
    ckpt.save(0)
    with pytest.raises(CheckpointError, match=r"step 0 was not saved: rank 1 .*builtins\.set"):
        ckpt.wait()
    ckpt.extra.clear()
    with pytest.raises(CheckpointError, match=r"model/1\.weight differs between the ranks"):
        ckpt.save(1)
    with torch.no_grad():
        same[1].weight.fill_(0)
    ckpt.save(1)
    assert ckpt.wait().ok


@pytest.fixture
def going_on(monkeypatch):
    """Return an event for which saves wait."""
    run, event = CommitProtocol.run, threading.Event()

    def slow(protocol, job):
        assert event.wait(300)
        return run(protocol, job)

    monkeypatch.setattr(CommitProtocol, "run", slow)
    return event


def test_an_interrupt_of_a_single_process_commits_the_pending_save(tmp_path, going_on):
    ckpt = Checkpointer(tmp_path, **parts())

    def train():
        ckpt.save(1)
        threading.Timer(0.1, going_on.set).start()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), ckpt:
        train()
    assert Checkpointer(tmp_path, **parts()).restore() == 1


def test_a_job_learns_of_each_commit_before_close_returns(tmp_path, monkeypatch, going_on):
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    place = tmp_path / "checkpoints"
    ckpt = Checkpointer(place, **parts())
    ckpt.save(4)
    assert newest_report(tmp_path).saved is None
    threading.Timer(0.1, going_on.set).start()
    ckpt.close()
    found = newest_report(tmp_path)
    assert (ckpt.outcome.ok, found.step, found.saved) == (True, 4, 4)
    # Another training may save there; a save of the first object is refused, and closing again is not.
    with Checkpointer(place, **parts()) as other:
        assert other.restore() == 4
        with pytest.raises(
            CheckpointError, match=r"another Checkpointer saves there \(this process\)"
        ):
            ckpt.save(5)
        ckpt.close()
    trainer = AMPTrainer(nn.Linear(2, 1), lambda model: torch.optim.SGD(model.parameters()))
    trainer.save_checkpoint(tmp_path / "of trainer", 6)
    assert newest_report(tmp_path).saved == 6


@ranks(2)
def test_a_rank_that_ends_without_close_waits_for_its_patience(rank, tmp_path):
    """Without this limit, the rank would still wait when the other rank takes part at last."""

    coming, run = threading.Event(), CommitProtocol.run
    CommitProtocol.run = lambda *save: (coming.wait(300 * rank), run(*save))[1]
    ckpt = Checkpointer(tmp_path / "checkpoints", **parts())
    ckpt.patience = 0.1
    ckpt.save(1)
    at_last = threading.Timer(30, coming.set)
    at_last.start()
    del ckpt  # As at the end of the interpreter.
    assert not (tmp_path / "checkpoints" / "step-000000001").exists()
    at_last.cancel()
    dist.barrier()
    coming.set()


def test_a_model_on_a_gpu_uses_page_locked_memory(tmp_path):
    for kind in ("cpu", "cuda"):
        trainer = AMPTrainer(nn.Linear(2, 1), lambda model: torch.optim.SGD(model.parameters()))
        trainer.device = torch.device(kind)
        engine = trainer.start_checkpoint(tmp_path / kind, 1)
        assert engine.staging.pinned == (kind == "cuda")
        assert engine.wait()[-1].ok


def test_a_save_without_restore_into_a_used_folder_is_refused(tmp_path):
    with Checkpointer(tmp_path, **parts()) as ckpt:
        ckpt.save(1)
    again = Checkpointer(tmp_path, **parts())
    with pytest.raises(
        CheckpointError, match=r"contains checkpoints up to step 1, .* call restore"
    ):
        again.save(1)
    assert again.restore() == 1
    again.save(2)
    assert again.wait().ok


def test_a_folder_that_everybody_may_write_to_is_refused(tmp_path):
    folder = tmp_path / "checkpoints"
    with Checkpointer(folder, **parts()) as ckpt:
        ckpt.save(1)
    folder.chmod(0o777)
    with pytest.raises(CheckpointError, match="everybody may write to it; run `chmod o-w"):
        Checkpointer(folder, **parts()).restore()
    folder.chmod(0o755)
    (folder / "step-000000001" / "rank-00000.bin").chmod(0o606)
    with pytest.raises(CheckpointError, match=r"rank-00000\.bin: everybody may write to it"):
        Checkpointer(folder, **parts()).restore()
    (folder / "step-000000001" / "rank-00000.bin").chmod(0o600)
    assert Checkpointer(folder, **parts()).restore() == 1


def test_a_snapshot_beyond_the_memory_budget_is_written_synchronously(tmp_path):
    ckpt = Checkpointer(tmp_path / "checkpoints", **parts(), host_memory=1e-8)
    ckpt.save(1)
    with pytest.warns(CheckpointWarning, match="step 1: training waited for this save"):
        outcome = ckpt.wait()
    assert "exceed the memory budget of 10 B" in outcome.notes[0]
    assert outcome.stalled == outcome.seconds
    del ckpt
    assert Checkpointer(tmp_path / "checkpoints", **parts()).restore() == 1


@pytest.mark.parametrize("quick", [0.0, 0.001, 1.0])
def test_an_interval_in_time_becomes_steps_by_the_current_pace(quick):
    now = [0.0]
    interval = EverySeconds(lambda: 60.0, Ranks(), clock=lambda: now[0])
    saves = [0.0]
    for step in range(1, 1000):
        # Quick first steps, as of a GPU that queues its work, do not delay a save.
        now[0] += quick if step < 5 else 1.0 if step < 200 else 3.0
        if interval.due(step):
            saves.append(now[0])
    assert len(saves) > 30
    assert all(57 <= b - a <= 66 for a, b in pairwise(saves))


def test_an_interval_in_steps_saves_at_or_after_its_multiples():
    steps = EverySteps(3)
    assert [n for n in range(1, 9) if steps.due(n)] == [3, 6]
    steps = EverySteps(10)
    assert [n for n in range(1, 60, 7) if steps.due(n)] == [15, 22, 36, 43, 50]
    assert not EverySteps(0).due(0)


def test_the_automatic_interval_is_young_s_within_bounds():
    assert young((2.0, 10.0), 3600.0) == 120.0
    assert young((2.0, 90.0), 3600.0) == 180.0
    assert young((0.0, 0.1), 60.0) == 30.0
    assert young((600.0, 1.0), 1e9) == 7200.0
    assert young(None, 3600.0) == young((5.0, 0.0), 3600.0)
