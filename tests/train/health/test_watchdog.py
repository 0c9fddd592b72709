"""The watchdog's decision on the cause of a hang, and its timeouts; whole hangs: ``test_hanging_runs.py``."""

import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.ranks.collective import Ranks
from hpcrun.storage.store import CheckpointStore
from hpcrun.train.health.hang_diagnosis import RankPosition, StallLimits, judge_hang
from hpcrun.train.health.watchdog import PeerFailure, Peers, Watchdog
from hpcrun.train.parallel import process_group
from hpcrun.train.position import (
    COMPILING,
    CONNECTING,
    PREPARING,
    PROFILING,
    TRAINING,
    VALIDATING,
    Position,
    showing_compilation,
)

HOSTS = ["n0", "n0", "n1", "n1"]


def answer(step: int | None = 7, at: str = "a.py:1 in f", **begun: int) -> RankPosition:
    told = {group: [(number, "all_reduce of 8")] for group, number in begun.items()}
    return RankPosition("n0", step, "training", 300.0, at, told)


def came_to(*collectives: str, first: int = 20) -> RankPosition:
    told = list(enumerate(collectives, first))
    return RankPosition("n0", 7, "training", 300.0, "a.py:1 in f", {"gloo/0": told})


def test_within_one_step_the_rank_with_fewer_collectives_is_behind() -> None:
    answers = {rank: answer(world=21, pairs=3) for rank in range(4)} | {1: answer(world=20)}
    hang = judge_hang(answers, HOSTS, 5.0, 300.0)
    assert (hang.rank, hang.host) == (1, "n0")
    assert hang.line.endswith("rank 1 on n0 is behind, training at a.py:1 in f")


def test_a_rank_that_waits_for_another_is_not_the_cause() -> None:
    # Two pairs of a hybrid mesh: rank 1 hangs; rank 0 waits for rank 1, and rank 2 waits for rank 0.
    answers = {0: answer(left=5, even=3), 1: answer(left=4, odd=3), 2: answer(right=5, even=4)}
    assert judge_hang(answers | {3: answer(right=5, odd=4)}, HOSTS, 5.0, 300.0).rank == 1


def test_a_rank_that_does_not_answer_is_named() -> None:
    answers = {0: answer(world=2), 1: answer(world=1), 2: answer(world=2)}
    hang = judge_hang(answers, [*HOSTS[:3], None], 5.0, 300.0)
    assert (hang.rank, hang.host) == (3, None)
    assert hang.line.endswith("in step 7: rank 3 does not answer")


def test_no_rank_is_named_if_all_wait_together() -> None:
    hang = judge_hang({0: answer(world=2), 1: answer(world=2)}, ["n0", "n1"], 5.0, 300.0)
    assert (hang.rank, hang.host) == (None, None)
    assert "all ranks are equally far" in hang.line


def test_no_rank_is_named_if_two_groups_cross() -> None:
    # Recorded: DDP with a parameter without gradient on rank 1, which is in a save.
    answers = {0: answer(world=9, control=18), 1: answer(at="b.py:2 in g", world=8, control=19)}
    hang = judge_hang(answers, ["n0", "n1"], 5.0, 300.0)
    assert (hang.rank, hang.host) == (None, None)
    assert (
        "rank 0 on n0 is training at a.py:1 in f; rank 1 on n1 is training at b.py:2" in hang.line
    )
    assert "; these never meet; " in hang.line


def test_a_single_rank_is_named_and_many_ranks_are_counted() -> None:
    alone = judge_hang({0: answer(None)}, ["n0"], 5.0, 2.0)
    assert alone.rank == 0
    assert alone.line == "no progress for 2 s before the first step: it is training at a.py:1 in f"
    many = judge_hang({9: answer()}, ["n0"] * 10, 5.0, 2.0)
    assert many.line.endswith("rank 3 on n0 does not answer; and 5 more")


def test_work_outside_steps_is_named_with_its_key() -> None:
    answers = {0: answer(world=2), 1: answer(world=3)}
    beside = {rank: replace(it, doing="validating") for rank, it in answers.items()}
    key = "; if this work needs more time, raise train.hang_start"
    assert judge_hang(beside, HOSTS[:2], 5.0, 1800.0).line.endswith(key)
    assert key not in judge_hang(answers, HOSTS[:2], 5.0, 300.0).line


def test_the_node_of_most_broken_links_is_named() -> None:
    broken = [
        {},
        {},
        {"n0": "10.0.0.1 (interface ib0: x)", "n1": "10.0.0.2 (interface ib0: x)"},
        None,
    ]
    broken[1]["n2"] = "10.0.0.3 (interface ib0: timed out)"
    answers = {
        rank: replace(answer(None), host=f"n{rank}", doing=CONNECTING, broken=found)
        for rank, found in enumerate(broken)
    }
    line = judge_hang(answers, HOSTS, 5.0, 300.0).line
    assert "; node n1 cannot connect to node n2 at 10.0.0.3 (interface ib0: timed out); " in line
    assert "; n2 is in 3 of 3 such pairs; check the firewall, " in line


def test_a_first_step_or_save_may_take_longer() -> None:
    limits = StallLimits.of(300.0, 1800.0, 1e6)
    position = Position(start=40)
    assert limits.allowed(position) == 1800
    with position.at(TRAINING):
        position.step = 40
        assert limits.allowed(position) == 1800
        position.step = 41
        assert limits.allowed(position) == 300
        with position.at("saving"):
            assert limits.allowed(position) == 1800
        assert limits.allowed(position) == 300
    assert limits.allowed(position) == 1800


def test_a_step_in_which_some_rank_compiles_may_take_longer() -> None:
    store, limits = dist.HashStore(), StallLimits.of(300.0, 1800.0, 1e6)
    position, peers = Position(step=41, doing=TRAINING, start=40), Peers(store)

    def stuck(idle: float) -> bool:
        return limits.exceeded(idle, position, peers.awaited)

    assert not stuck(299)
    assert stuck(301)
    store.add("awaited", 1)
    assert not stuck(301)
    assert stuck(1801)
    store.add("awaited", -1)
    assert stuck(301)
    position.doing = COMPILING
    assert not stuck(301)


@pytest.mark.parametrize("work", [COMPILING, PROFILING])
def test_a_rank_shows_the_work_for_which_others_wait(tmp_path: Path, work: str) -> None:
    # The others may be in a step while this rank compiles, or writes a trace to a slow disk.
    store, position = dist.HashStore(), Position(step=41, doing=TRAINING, start=40)
    limits = StallLimits.of(1.0, 1800.0, 1e6)

    def awaited(number: int) -> bool:
        until = time.monotonic() + 300
        while store.add("awaited", 0) != number and time.monotonic() < until:
            time.sleep(0.01)
        return store.add("awaited", 0) == number

    with Watchdog(position, limits, tmp_path, Ranks(1, 2), store=store, on_exit=lambda: None):
        with position.at(work):
            assert awaited(1)
        assert awaited(0)
        position.doing = "saving"


@pytest.mark.parametrize(
    ("doing", "seconds"),
    [(TRAINING, 10), (VALIDATING, 10), ("saving", 60), (PROFILING, 60), ("restoring", 60)],
)
def test_a_rank_waiting_on_its_gpu_ends(doing: str, seconds: float) -> None:
    store, limits = dist.HashStore(), StallLimits.of(300.0, 1800.0, 1e6)
    failure = PeerFailure(Peers(store), limits)
    assert not failure.outlived(doing, 50.0)
    store.set("failed", "1")
    assert not failure.outlived(doing, 55.0)
    # Outside steps, a rank may still commit a save.
    assert not failure.outlived(doing, 54.0 + seconds)
    assert failure.outlived(doing, 55.0 + seconds)


class Counted:
    """A store that keeps the keys of each question, and has no notes."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def check(self, keys: list[str]) -> bool:
        self.asked += keys
        return False

    def set(self, *_: object) -> None:
        """Forget a note."""


def test_each_tick_asks_the_store_for_two_notes(tmp_path: Path) -> None:
    """docs/scale.md counts these requests."""
    store: Any = Counted()
    limits, position = StallLimits.of(1.0, 1800.0, 1e6), Position(step=41, doing=TRAINING, start=40)
    with Watchdog(position, limits, tmp_path, Ranks(1, 2), store=store, on_exit=lambda: None):
        until = time.monotonic() + 300
        while len(store.asked) < 8 and time.monotonic() < until:
            position.step += 1
            time.sleep(0.01)
    pairs = list(zip(store.asked[::2], store.asked[1::2], strict=False))
    assert len(pairs) >= 4
    assert {*pairs} == {("failed", "alarm")}
    assert StallLimits.of(300.0, 1800.0, 600.0).tick == 5.0


class LosesRequests:
    """A store whose answers fail from now on."""

    def add(self, *_: object) -> int:
        raise RuntimeError("Broken pipe")

    set = get = check = add


@pytest.mark.parametrize("request_", ["awaited", "alarm"])
def test_a_lost_store_makes_no_compilation_a_hang(
    request_: str,
) -> None:
    limits = StallLimits.of(300.0, 1800.0, 1e6)
    position = Position(step=41, doing=TRAINING, start=40)
    lost: Any = LosesRequests()
    peers, alone = Peers(lost), Peers(None)
    if request_ == "alarm":
        assert not peers.wrote("alarm")
    assert not limits.exceeded(301, position, peers.awaited)
    assert not limits.exceeded(306, position, peers.awaited)
    assert limits.exceeded(1801, position, peers.awaited)
    assert limits.exceeded(301, position, alone.awaited)


def test_torch_shows_when_it_compiles() -> None:
    position, seen = Position(step=41, doing=TRAINING), []

    def backend(graph: Any, _: Any) -> Any:
        seen.append(position.doing)
        return graph.forward

    with showing_compilation(position, wanted=True):
        double = torch.compile(lambda x: 2 * x, backend=backend, dynamic=False)
        double(torch.ones(2))
        assert position.doing == TRAINING
        double(torch.ones(2))
        double(torch.ones(3))
        with position.at("validating"):
            double(torch.ones(4))
    assert seen == [COMPILING, COMPILING, "validating"]
    double(torch.ones(5))
    assert seen[3] == TRAINING


def test_preparing_may_take_a_day_and_collectives_wait_for_it() -> None:
    limits = StallLimits.of(300.0, 1800.0, 600.0, 250.0)
    with (position := Position()).at(PREPARING):
        assert limits.allowed(position) == 86400
    with position.at(CONNECTING):
        assert limits.allowed(position) == 250
    assert limits.end("saving") < 2000 < 86400 < limits.end(PREPARING)


def test_the_watchdog_finishes_before_a_collective_times_out() -> None:
    for timeout in (2.0, 30.0, 600.0):
        limits = StallLimits.of(300.0, 1800.0, timeout)
        # Fired, answered, judged, and the silent ranks' stacks waited for.
        assert limits.step + limits.tick + 2 * limits.answer < timeout


@pytest.mark.parametrize("debug", [dist.DebugLevel.OFF, dist.DebugLevel.DETAIL])
def test_all_groups_except_the_saves_wait_for_the_watchdog(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, debug: Any
) -> None:
    before, one = dist.get_debug_level(), dist.HashStore()
    dist.set_debug_level(debug)
    dist.init_process_group("gloo", store=one, rank=0, world_size=1, timeout=timedelta(seconds=600))
    try:
        one.set_timeout(timedelta(seconds=500))
        dist.new_group(backend="gloo", timeout=timedelta(days=1))
        CheckpointEngine(
            CheckpointStore(tmp_path, "test-0"),
            Ranks(0, 2),
            still_mine=lambda: None,
            after_commit=lambda _: None,
            timeout=1800.0,
        )
        monkeypatch.setitem(dist.distributed_c10d._world.pg_map, OfGpus(), ("nccl", one))
        assert limits() == [500, 600, 86400, 1800, 600]
        with process_group.waiting_at_least(1925.0):
            assert limits() == [1925, 1925, 86400, 1800, 1925]
        assert limits() == [500, 600, 86400, 1800, 600]
        monkeypatch.undo()
    finally:
        dist.destroy_process_group()
        dist.set_debug_level(before)


class OfGpus:
    """A group with a backend for GPUs only, as with NCCL."""

    group_desc = "gradients"
    _device_types = (torch.device("cuda"),)

    def __init__(self) -> None:
        self.options = SimpleNamespace(_timeout=timedelta(seconds=600))

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def _set_default_timeout(self, limit: timedelta) -> None:
        self.options = SimpleNamespace(_timeout=limit)


def limits() -> list[float]:
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(torch.device("cpu")) for group in groups]
    bare = (getattr(backend, "wrapped_pg", backend) for backend in backends)
    store: Any = dist.distributed_c10d._get_default_store()
    found = [store.timeout, *(backend.options._timeout for backend in bare)]
    return [limit.total_seconds() for limit in found]
