"""Rank 0 publishes its address, and other ranks find it."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, RunError, create
from hpcrun.run.files import read_json
from hpcrun.run.rendezvous import Rendezvous, RendezvousFile, ScriptEnded

RENDEZVOUS = Rendezvous(("node1", "10.0.0.1"), 12345, key="a key")
FIRST = Attempt("7", 0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create(tmp_path / "a", "x", {})


@pytest.fixture
def rank_0(run: RunDirectory) -> RendezvousFile:
    return RendezvousFile(run, FIRST)


@pytest.fixture
def other(run: RunDirectory) -> RendezvousFile:
    return RendezvousFile(run, FIRST)


def nowhere(*_: object) -> None:
    """Act as a host that does not answer."""


def test_the_published_address_of_this_attempt_is_read(
    run: RunDirectory, rank_0: RendezvousFile, other: RendezvousFile
) -> None:
    with pytest.raises(RunError, match="published no address"):
        other.wait(0.1)
    rank_0.publish(RENDEZVOUS)
    assert other.wait(60) == RENDEZVOUS
    with pytest.raises(RunError):
        RendezvousFile(run, FIRST.following).wait(0.1)


@pytest.mark.parametrize(("ranks", "seconds", "most"), [(1, 60, 70), (100_000, 1000, 13)])
def test_more_ranks_read_less_often(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, ranks: int, seconds: int, most: int
) -> None:
    reads: list[Path] = []
    clock = [0.0]
    monkeypatch.setattr("hpcrun.run.rendezvous.read_json", reads.append)
    monkeypatch.setattr("time.monotonic", lambda: clock[0])
    monkeypatch.setattr("time.sleep", lambda pause: clock.append(clock.pop() + pause))
    with pytest.raises(RunError):
        RendezvousFile(run, FIRST, ranks=ranks).wait(seconds)
    assert seconds / max(1.0, ranks / 1000) <= len(reads) < most


def test_addresses_are_tried_in_turn_until_one_is_reachable(
    rank_0: RendezvousFile, other: RendezvousFile
) -> None:
    rank_0.publish(RENDEZVOUS)
    tried: list[str] = []

    def connect(address: str, rendezvous: Rendezvous, patience: float) -> str | None:
        tried.append(address)
        return f"{address}:{rendezvous.port}" if address == "10.0.0.1" else None

    assert other.meet(connect, 10) == "10.0.0.1:12345"
    assert tried == ["node1", "10.0.0.1"]


def test_the_address_of_an_earlier_start_is_replaced(
    rank_0: RendezvousFile, other: RendezvousFile
) -> None:
    # Two steps of one salloc are the same attempt.
    rank_0.publish(dataclasses.replace(RENDEZVOUS, key="of the step before"))

    def connect(address: str, rendezvous: Rendezvous, patience: float) -> str | None:
        if rendezvous.key == RENDEZVOUS.key:
            return address
        rank_0.publish(RENDEZVOUS)
        return None

    assert other.meet(connect, 30) == "node1"


def test_a_rank_that_cannot_reach_rank_0_lists_the_addresses(
    rank_0: RendezvousFile, other: RendezvousFile
) -> None:
    rank_0.publish(RENDEZVOUS)
    with pytest.raises(RunError, match=r"port 12345 of node1, 10\.0\.0\.1.*job\.interface"):
        other.meet(nowhere, 0.1)


def test_a_stale_handle_is_read_again(
    rank_0: RendezvousFile, other: RendezvousFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank_0.publish(RENDEZVOUS)
    errors = iter([OSError(116, "Stale file handle")])

    def stale_once(path: Path) -> object:
        for error in errors:
            raise error
        return read_json(path)

    monkeypatch.setattr("hpcrun.run.rendezvous.read_json", stale_once)
    assert other.wait(60) == RENDEZVOUS
    assert next(errors, None) is None


def test_a_waiting_rank_sees_the_end_of_rank_0(
    rank_0: RendezvousFile, other: RendezvousFile
) -> None:
    tried: list[str] = []
    rank_0.publish(RENDEZVOUS)

    def connect(address: str, rendezvous: Rendezvous, patience: float) -> None:
        tried.append(address)
        rank_0.publish_end("stopped")

    with pytest.raises(ScriptEnded) as ended:
        other.meet(connect, 600)
    assert ended.value.rendezvous.end == "stopped"
    assert tried == ["node1", "10.0.0.1"]


def test_an_earlier_step_s_end_is_not_this_step_s(run: RunDirectory) -> None:
    before = RendezvousFile(run, FIRST, step="1")
    before.publish(RENDEZVOUS)
    before.publish_end("done")
    met = RendezvousFile(run, FIRST, step="2").meet(lambda address, *_: address, 10)
    assert met == "node1"
