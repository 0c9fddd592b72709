"""Slow nodes: the decision on simulated times, and real ranks of which one is slow."""

import random
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from hpcrun import get_rank
from hpcrun.run.files import read_lines
from hpcrun.run.slow_nodes import SlowNode, slow_nodes, slow_now
from hpcrun.train.health.slow_nodes import SlowNodes, slow_hosts
from tests.support.journal import read_events
from tests.support.on_ranks import forked
from tests.support.training.faulty_tasks import Exact
from tests.support.training.runs import DONE, STOPPED_ONCE, play_run

EVERY = 10


def changes(
    nodes: SlowNodes, lines: Iterator[Sequence[float]], *, step: float = 0.3
) -> tuple[list[SlowNode], list[str]]:
    """Return all nodes that become slow, and those that no longer are, over ``lines`` of ten steps."""
    begun, over = [], []
    for number, own in enumerate(lines, 1):
        new, gone = nodes.add(EVERY * number, EVERY, own, step)
        begun += new
        over += gone
    return begun, over


def noisy(ranks: int, seed: int, slow: dict[int, float], lines: int) -> Iterator[list[float]]:
    """Yield times of 0.1 s with noise of 10 %, and a stall of half a second in every hundredth time."""
    draw = random.Random(seed)
    for _ in range(lines):
        stalls = [0.5 if draw.random() < 0.01 else 0.0 for _ in range(ranks)]
        yield [
            0.1 * slow.get(rank, 1.0) * draw.lognormvariate(0.0, 0.1) + stall
            for rank, stall in enumerate(stalls)
        ]


def test_ranks_are_compared_with_those_of_other_nodes() -> None:
    # Half of all ranks are slow, because their node is.
    found = slow_hosts(["a"] * 4 + ["b"] * 4, [0.2, 0.21, 0.2, 0.2, 0.1, 0.1, 0.11, 0.1], 0.5)
    assert found == {"a": (1, pytest.approx(0.21 / 0.11))}
    assert slow_hosts(["a"] * 4, [0.1, 0.1, 0.25, 0.1], 0.3) == {"a": (2, pytest.approx(2.5))}
    both = slow_hosts(["a", "b", "c", "d"], [0.2, 0.3, 0.1, 0.1], 0.5)
    assert {host: rank for host, (rank, _) in both.items()} == {"a": 0, "b": 1}
    assert slow_hosts(["a"], [0.5], 1.0) == {}


def test_a_small_delay_is_not_slow() -> None:
    assert slow_hosts(["a", "b"], [0.1, 0.119], 0.3) == {}
    # In tiny steps, milliseconds are noise of the machine; in long steps they cost nothing.
    assert slow_hosts(["a", "b"], [0.0041, 0.0068], 0.012) == {}
    assert slow_hosts(["a", "b"], [0.1, 0.13], 1.0) == {}


def test_three_windows_make_and_end_a_slow_node() -> None:
    nodes = SlowNodes(["a", "b", "c"])

    def lines() -> Iterator[list[float]]:
        for number in range(1, 41):
            yield [0.1, 0.16 if number <= 21 else 0.1, 0.1]

    # The first ten steps do not count, then a window has fifty.
    begun, over = changes(nodes, lines())
    assert (begun, over) == ([SlowNode("b", 1, 1.6, 160)], ["b"])


def test_a_window_needs_five_lines_and_fifty_steps() -> None:
    single, rare = SlowNodes(["a", "b"]), SlowNodes(["a", "b"])
    by_step = [one for step in range(1, 200) for one in single.add(step, 1, [0.1, 0.2], 0.3)[0]]
    by_line = [
        one for line in range(1, 20) for one in rare.add(line * 100, 100, [0.1, 0.2], 0.3)[0]
    ]
    assert [one.since for one in by_step] == [160]
    # The first line has the first steps.
    assert [one.since for one in by_line] == [1600]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("ranks", [2, 16, 64])
def test_noise_names_and_hides_no_node(ranks: int, seed: int) -> None:
    hosts = [f"n{rank}" for rank in range(ranks)]
    assert changes(SlowNodes(hosts), noisy(ranks, seed, {}, 1000)) == ([], [])
    begun, over = changes(SlowNodes(hosts), noisy(ranks, seed, {ranks - 1: 1.5}, 200))
    assert ([one.rank for one in begun], over) == ([ranks - 1], [])
    assert 1.3 < begun[0].ratio < 1.7


class Slowed(Exact):
    """A task that keeps a rank busy in its data set (``where: data``), its loss or a block of its model."""

    def busy(self, where: str) -> None:
        own = self.config.model.own
        if own["where"] == where and get_rank() == own["slow"]:
            until = time.perf_counter() + own["busy"]
            while time.perf_counter() < until:
                pass

    def mishap(self) -> None:
        self.busy("loss")

    def build_model(self) -> nn.Module:
        blocks = [Block(self), Block(self)]
        # The statistics of a batch norm are buffers, which DDP sends before each forward pass.
        return nn.Sequential(
            nn.Linear(4, 8), nn.Sequential(*blocks), nn.BatchNorm1d(8), nn.Linear(8, 1)
        )

    def train_dataset(self) -> Any:
        return Samples(self)


class Block(nn.Module):
    def __init__(self, task: Slowed) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.task = [task]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.task[0].busy("block")
        return self.layer(x)


class Samples(Exact.Known):
    def __init__(self, task: Slowed) -> None:
        super().__init__()
        self.task = task

    def __getitem__(self, index: int) -> torch.Tensor:
        self.task.busy("data")
        return super().__getitem__(index)


BUSY = ("data.workers=0", "train.validate_every=0")


@pytest.mark.parametrize(
    ("parallel", "where", "slow"),
    [
        ("ddp", "loss", 1),
        pytest.param("ddp", "data", 0, marks=pytest.mark.slow),
        pytest.param("fsdp", "block", 1, marks=pytest.mark.slow),
        ("fsdp", "data", 0),
    ],
)
@forked
def test_the_own_work_of_a_slow_rank_is_longer(tmp_path, parallel, where, slow):
    played = play_run(
        tmp_path,
        Slowed,
        *(*BUSY, f"train.parallel={parallel}", "train.log_every=8"),
        *(f"model.where={where}", f"model.slow={slow}", "model.busy=0.1"),
    )
    assert played.codes == DONE, played.said()
    (line,) = [one for one in read_lines(played.run.metrics) if "slowest_rank" in one]
    assert line["slowest_rank"] == slow
    # The other rank waits at least as long as the slow rank is busy.
    assert line["slowest_own_time"] > 0.09
    assert line["fastest_own_time"] < line["slowest_own_time"] / 2
    assert played.events("slow") == []


@pytest.mark.slow
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
@forked
def test_a_slow_node_is_left_at_the_next_save(tmp_path, monkeypatch, parallel):
    def begin(rank, restart):
        monkeypatch.setenv("SLURMD_NODENAME", f"n{rank}")

    slowed = ("model.where=block", "model.slow=1", "model.busy=0.02", "train.steps=400")
    often = ("checkpoint.every=75", "train.log_every=10", f"train.parallel={parallel}")
    played = play_run(
        *(tmp_path, Slowed, *BUSY, *often, *slowed),
        *("restarts.replace_slow=true",),
        begin=begin,
    )
    assert played.codes == STOPPED_ONCE, played.said()
    (stop,) = played.events("stopped")
    assert (stop.cause, stop.step, stop.hosts) == ("slow-node", 225, ["n1"])
    found = slow_nodes(read_events(played.run))
    # The second attempt on the same nodes names the node again, and does not stop again.
    assert [(one.host, one.rank) for one in found] == [("n1", 1)] * 2
    assert [one.host for one in slow_now(read_events(played.run))] == ["n1"]
    assert "n1 is slow: rank 1 takes" in played.said()
    assert played.events("saved")[-1].step == 400
