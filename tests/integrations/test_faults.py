"""Kills and damage: a run with ``hpcrun.resumable`` still ends with the bits of an undisturbed run."""

import os
import signal
from functools import partial

import torch
import torch.distributed as dist

from tests.checkpoint.test_quarantine import flip
from tests.on_ranks import forked
from tests.train.forks import fork_ranks

from . import loops


def play(folder, start, train, at, rank):
    """Train on a rank of two, and write the hash of its weights to ``end-START-RANK``."""
    torch.set_num_threads(1)
    store = f"file://{folder}/store-{start}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    end = train(folder / start.partition(" ")[0], at)
    (folder / f"end-{start}-{rank}").write_text(end)
    dist.destroy_process_group()


def attempt(folder, start, at=loops.nothing, train=loops.classic):
    """Return the exit codes of an attempt on two ranks, and the output of rank 0.

    The first word of ``start`` is the folder of the checkpoints.
    """
    logs = folder / f"logs-{start}"
    logs.mkdir()
    codes = fork_ranks(2, partial(play, folder, start, partial(train, workers=0), at), logs)
    return codes, (logs / "rank-0.log").read_text()


def kill(step, now):
    """Kill this rank after ``step``."""
    if now == step:
        os.kill(os.getpid(), signal.SIGKILL)


@forked
def test_a_kill_and_a_flipped_byte_change_no_bit(tmp_path):
    assert attempt(tmp_path, "cut 1", partial(kill, 5))[0] == [-9, -9]
    assert attempt(tmp_path, "cut 2", loops.stop(7, signal.SIGTERM))[0] == [75, 75]
    newest = max((tmp_path / "cut").glob("step-*"))
    assert newest.name == "step-000000008"
    flip(newest / "rank-00001.bin")

    codes, log = attempt(tmp_path, "cut 3")
    assert codes == [0, 0], log
    assert "resumed after step 6" in log
    assert "step 8 skipped: " in log
    assert "rank-00001.bin" in log
    assert attempt(tmp_path, "whole")[0] == [0, 0]
    ends = [(tmp_path / f"end-{start}-0").read_text() for start in ("cut 3", "whole")]
    assert ends[0] == ends[1]

    # The finished training does not train again.
    codes, log = attempt(tmp_path, "cut 4", partial(kill, 16))
    assert codes == [0, 0], log
    assert (tmp_path / "end-cut 4-1").read_text() == ends[0]
