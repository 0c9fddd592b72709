"""A tree gives the results of gloo's full mesh, on any number of ranks, and ends as fast when a rank dies."""

import math
import os
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d

from hpcrun.ranks import tree_group
from hpcrun.ranks.collective import StopAgreement
from hpcrun.ranks.signals import StopReason
from hpcrun.ranks.tree_group import TreeGroup, levels
from hpcrun.train.health import hang_diagnosis
from hpcrun.train.parallel import process_group
from tests.support.on_ranks import forked, ranks
from tests.support.training.forks import fork_ranks

LIMIT = timedelta(seconds=120)

c10d: Any = _distributed_c10d


@pytest.fixture(autouse=True)
def many_open_files() -> Iterator[None]:
    """Allow sockets between all ranks of a full mesh in one process; gloo aborts without them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    if soft != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def on_threads(size: int, play: Callable[[int], Any]) -> list[Any]:
    """Run ``play`` for each rank in a thread, and return the results by rank."""
    found: dict[int, Any] = {}

    def run(rank: int) -> None:
        try:
            found[rank] = play(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(size)]


def both(size: int, fan_out: int, play: Callable[[Any, int], Any]) -> tuple[list[Any], list[Any]]:
    """Run ``play`` on gloo's group and on a tree, and return the results of both."""
    store = c10d.HashStore()

    def flat(rank: int) -> Any:
        return play(c10d.ProcessGroupGloo(c10d.PrefixStore("flat", store), rank, size, LIMIT), rank)

    def tree(rank: int) -> Any:
        place = c10d.PrefixStore("tree", store)
        group = TreeGroup(place, rank, size, LIMIT, fan_out=fan_out)
        try:
            return play(group, rank)
        finally:
            group.shutdown()

    return on_threads(size, flat), on_threads(size, tree)


def collectives(size: int, seed: int) -> Callable[[Any, int], list[Any]]:
    """Return a program of random collectives with random tensors, the same on every rank."""

    def play(group: Any, rank: int) -> list[Any]:
        plan, results = random.Random(seed), []
        for _ in range(8):
            kind = plan.choice(
                ["allreduce", "allgather", "gather", "scatter", "broadcast", "barrier"]
            )
            dtype = plan.choice([torch.int32, torch.int64, torch.uint8, torch.float64])
            shape = plan.choice([(), (1,), (7,), (3, 2)])
            numbers = torch.Generator().manual_seed(1000 * plan.randrange(1000) + rank)
            # Whole numbers: the order of a sum makes no difference.
            value = torch.randint(0, 100, shape, generator=numbers).to(dtype)
            into = [torch.empty_like(value) for _ in range(size)]
            if kind == "allreduce":
                wanted = c10d.AllreduceOptions()
                wanted.reduceOp = plan.choice([c10d.ReduceOp.SUM, c10d.ReduceOp.MAX])
                group.allreduce([value], wanted).wait()
                results.append(value.tolist())
            elif kind == "broadcast":
                group.broadcast([value], c10d.BroadcastOptions()).wait()
                results.append(value.tolist())
            elif kind == "allgather":
                group.allgather([into], [value], c10d.AllgatherOptions()).wait()
                results.append([piece.tolist() for piece in into])
            elif kind == "gather":
                group.gather([into] if rank == 0 else [], [value], c10d.GatherOptions()).wait()
                results.append([piece.tolist() for piece in into] if rank == 0 else None)
            elif kind == "scatter":
                given = [torch.full_like(value, plan.randrange(100)) for _ in range(size)]
                group.scatter([value], [given] if rank == 0 else [], c10d.ScatterOptions()).wait()
                results.append(value.tolist())
            else:
                group.barrier(c10d.BarrierOptions()).wait()
        return results

    return play


@pytest.mark.parametrize("seed", range(8))
def test_random_collectives_give_what_a_full_mesh_gives(seed: int) -> None:
    draw = random.Random(seed)
    size, fan_out = draw.randrange(1, 41), draw.randrange(2, 9)
    flat, tree = both(size, fan_out, collectives(size, seed))
    assert tree == flat
    assert not any(isinstance(told, Exception) for told in flat), flat


def test_a_rank_does_not_wait_for_an_idle_peer() -> None:
    store, ended = c10d.HashStore(), threading.Event()

    def play(rank: int) -> float:
        group = TreeGroup(store, rank, 2, LIMIT, fan_out=2, longest_end=1.0)
        if rank == 1:
            ended.wait()
            group.shutdown()
            return 0.0
        group.allreduce([torch.ones(1)])
        before = time.monotonic()
        group.shutdown()
        ended.set()
        return time.monotonic() - before

    waited, _ = on_threads(2, play)
    assert 0.9 < waited < 30


def test_collectives_that_are_begun_together_are_carried_out_in_order() -> None:
    store = c10d.HashStore()

    def play(rank: int) -> list[int]:
        group = TreeGroup(store, rank, 7, LIMIT, fan_out=3)
        values = [torch.tensor([rank * scale]) for scale in (1, 10, 100)]
        begun = [group.allreduce([value]) for value in values]
        for work in reversed(begun):
            work.wait()
        assert [name for _, name in group.begun()] == ["all_reduce of 1"] * 3
        group.shutdown()
        return [int(value) for value in values]

    assert on_threads(7, play) == [[21, 210, 2100]] * 7


def test_a_late_rank_ends_the_collective_within_the_limit() -> None:
    store, over = c10d.HashStore(), threading.Event()

    def play(rank: int) -> str:
        group = TreeGroup(store, rank, 9, timedelta(seconds=5), fan_out=2)
        if rank == 6:
            over.wait(300)
            group.shutdown()
            return "late"
        try:
            group.allreduce([torch.ones(1)]).wait()
        except RuntimeError:
            return "ended"
        finally:
            if rank == 0:
                over.set()
            group.shutdown()
        return "not ended"

    told = on_threads(9, play)
    assert told.pop(6) == "late"
    assert told == ["ended"] * 8


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> TreeGroup:
    """Return this rank's control group, a tree with a fan-out of 2."""
    monkeypatch.setattr(tree_group, "FAN_OUT", 2)
    group = tree_group.new_control_group(timeout=timedelta(seconds=400))
    assert isinstance(group, TreeGroup)
    return group


@ranks(7)
def test_a_stop_of_any_rank_is_agreed_by_all(rank: int, tree: TreeGroup) -> None:
    """Request one stop on each rank in turn: each stop is agreed on at the next exchange."""
    agreement, stops = StopAgreement(tree), []
    for step in range(15):
        local = StopReason.TERMINATE if step == 3 + rank else StopReason.NONE
        if agreement.exchange(step, local):
            stops.append(step)
    agreement.finish()
    assert stops == [4 + rank for rank in range(7)]


@ranks(7)
def test_the_groups_of_torch_accept_a_tree(rank: int, tree: TreeGroup, tmp_path: Path) -> None:
    dist.all_reduce(torch.ones(1), group=tree)
    found = [None] * 7
    dist.all_gather_object(found, f"rank {rank}", group=tree)
    assert found == [f"rank {rank}" for rank in range(7)]
    begun = hang_diagnosis.dump(tmp_path, rank)[f"control/{tree.group_name}"]
    assert begun[0][1] == "all_reduce of 1"

    def limit() -> float:
        return float(tree.options._timeout.total_seconds())

    assert limit() == 400.0
    with process_group.waiting_at_least(1925.0):
        assert limit() == 1925.0
    assert limit() == 400.0
    dist.barrier(group=tree)


# Rank 0 leads all, rank 4 leads ranks 5 and 6, and rank 5 leads no rank.
@pytest.mark.parametrize("dead", [0, 4, 5])
@forked
def test_the_death_of_a_rank_ends_waiting_collectives(tmp_path: Path, dead: int) -> None:
    # Longer than the test allows an end to take: no rank may wait for it.
    limit = timedelta(seconds=400)

    def waited() -> list[float]:
        return [float(path.read_text()) for path in tmp_path.glob("*.txt")]

    def play(rank: int) -> None:
        """Kill rank ``dead``; the other ranks record how long they wait, and keep their processes."""
        store = dist.FileStore(str(tmp_path / "rendezvous"), 7)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=7, timeout=limit)
        tree_group.FAN_OUT = 2
        group = tree_group.new_control_group(timeout=limit)
        dist.barrier(group=group)
        if rank == dead:
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        try:
            dist.barrier(group=group)
        except RuntimeError:
            part = tmp_path / f"{rank}.part"
            part.write_text(str(time.monotonic() - began))
            part.rename(part.with_suffix(".txt"))
        # The exit of a rank must not end the other ranks.
        until = time.monotonic() + 280
        while time.monotonic() < until and len(waited()) < 6:
            time.sleep(0.1)

    codes = fork_ranks(7, play)
    assert codes == [-signal.SIGKILL if rank == dead else 0 for rank in range(7)]
    assert len(waited()) == 6
    assert max(waited()) < 200


@pytest.mark.parametrize("seed", range(20))
def test_every_rank_but_rank_zero_has_one_leader(seed: int) -> None:
    draw = random.Random(seed)
    world_size, fan_out = draw.randrange(1, 300), draw.randrange(2, 20)
    found = {rank: list(levels(rank, world_size, fan_out)) for rank in range(world_size)}
    for rank, mine in found.items():
        for level in mine:
            # All members have the same group.
            for member in level.members:
                assert level in found[member]
        # Only a leader has a next level.
        assert all(level.leader == rank for level in mine[:-1])
        if rank:
            assert mine[-1].leader < rank
    assert all(level.leader == 0 for level in found[0])


@pytest.mark.parametrize("world_size", [8, 64, 512, 4096, 8192])
def test_peers_grow_with_the_logarithm_of_the_ranks(world_size: int) -> None:
    peers = [
        sum(len(level.members) - 1 for level in levels(rank, world_size, 16))
        for rank in range(world_size)
    ]
    assert max(peers) <= 15 * math.ceil(math.log(world_size, 16))
    assert sum(peers) / world_size < 16
