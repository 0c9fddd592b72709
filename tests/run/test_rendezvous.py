"""Rank 0 publishes its address, and other ranks find it, also through the memory of their node."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from hpcrun.run.directory import RunDirectory, RunError, create
from hpcrun.run.events import Attempt
from hpcrun.run.rendezvous import Rendezvous, RendezvousFile, RendezvousStopped, ScriptEnded

RENDEZVOUS = Rendezvous(("node1", "10.0.0.1"), 12345, key="a key")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create(tmp_path / "a", "x", {})


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    (tmp_path / "memory").mkdir()
    return tmp_path / "memory"


def rendezvous_file(
    run: RunDirectory, memory: Path, *, first: bool, restart: int = 0, **options: Any
) -> RendezvousFile:
    return RendezvousFile(run, Attempt("7", restart), first=first, memory=memory, **options)


def nowhere(*_: object) -> None:
    """Act as a host that does not answer."""


def test_the_published_address_is_read_on_another_node(run: RunDirectory, tmp_path: Path) -> None:
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
    other = rendezvous_file(run, tmp_path / "there", first=True)
    with pytest.raises(RunError, match="published no address"):
        other.wait(0.1)
    rendezvous_file(run, tmp_path / "here", first=True).publish(RENDEZVOUS)
    assert other.wait(60) == RENDEZVOUS
    with pytest.raises(RunError):
        rendezvous_file(run, tmp_path / "there", first=True, restart=1).wait(0.1)


def test_only_the_first_rank_of_a_node_polls(
    run: RunDirectory, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[str] = []
    monkeypatch.setattr(
        "hpcrun.run.rendezvous.read_json",
        lambda _: looks.append(threading.current_thread().name),
    )

    def wait(first: bool) -> None:
        with pytest.raises(RunError):
            rendezvous_file(run, memory, first=first).wait(3.0)

    names = ["first", "second", "third"]
    threads = [threading.Thread(target=wait, args=(it == "first",), name=it) for it in names]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(looks) == {"first"}
    # From a poll every 0.05 s to a poll per second: 3 s at the first rate would be 60 polls.
    assert len(looks) < 15


def test_the_first_rank_copies_the_address_for_its_node(
    run: RunDirectory, memory: Path, tmp_path: Path
) -> None:
    (tmp_path / "rank-0").mkdir()
    rendezvous_file(run, tmp_path / "rank-0", first=True).publish(RENDEZVOUS)
    second, first = (
        rendezvous_file(run, memory, first=False),
        rendezvous_file(run, memory, first=True),
    )
    with pytest.raises(RunError):
        second.wait(0.2)
    assert first.wait(60) == RENDEZVOUS
    assert second.wait(60) == RENDEZVOUS
    (handed,) = memory.iterdir()
    assert handed.stat().st_mode & 0o777 == 0o600
    second.clear()
    assert handed.exists()
    first.clear()
    assert not handed.exists()


@pytest.mark.parametrize("how", ["owner", "writable", "link", "pipe"])
def test_a_file_that_other_users_can_write_is_ignored(
    run: RunDirectory, memory: Path, tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rendezvous_file(run, memory, first=True)
    first.publish(RENDEZVOUS)
    (handed,) = memory.iterdir()
    if how == "owner":
        theirs = handed.stat().st_uid + 1
        # The name contains the user id: this file belongs to another user.
        os.chown(handed, theirs, -1) if os.geteuid() == 0 else pytest.skip("needs root")
    elif how == "writable":
        handed.chmod(0o620)
    elif how == "link":
        handed.rename(tmp_path / "elsewhere.json")
        handed.symlink_to(tmp_path / "elsewhere.json")
    else:
        handed.unlink()
        os.mkfifo(handed)
    with pytest.raises(RunError):
        rendezvous_file(run, memory, first=False).wait(0.3)


def test_a_rank_without_a_copy_polls_the_shared_file_itself(
    run: RunDirectory, memory: Path, tmp_path: Path
) -> None:
    (tmp_path / "rank-0").mkdir()
    rendezvous_file(run, tmp_path / "rank-0", first=True).publish(RENDEZVOUS)
    waiting = rendezvous_file(run, memory, first=False, second_look=0.3)
    assert waiting.wait(20) == RENDEZVOUS


def test_addresses_are_tried_in_turn_until_one_is_reachable(
    run: RunDirectory, memory: Path
) -> None:
    rendezvous_file(run, memory, first=True).publish(RENDEZVOUS)
    tried: list[str] = []

    def connect(address: str, rendezvous: Rendezvous, patience: float) -> str | None:
        tried.append(address)
        return f"{address}:{rendezvous.port}" if address == "10.0.0.1" else None

    assert rendezvous_file(run, memory, first=True).meet(connect, 10) == "10.0.0.1:12345"
    assert tried == ["node1", "10.0.0.1"]


@pytest.mark.parametrize("first", [True, False])
def test_the_address_of_an_earlier_start_is_replaced(
    run: RunDirectory, memory: Path, first: bool
) -> None:
    # Two steps of one salloc are the same attempt.
    rank_0 = rendezvous_file(run, memory, first=True)
    rank_0.publish(dataclasses.replace(RENDEZVOUS, key="of the step before"))

    def connect(address: str, rendezvous: Rendezvous, patience: float) -> str | None:
        if rendezvous.key == RENDEZVOUS.key:
            return address
        rank_0.publish(RENDEZVOUS)
        return None

    assert rendezvous_file(run, memory, first=first).meet(connect, 30) == "node1"


def test_a_rank_that_cannot_reach_rank_0_lists_the_addresses(
    run: RunDirectory, memory: Path
) -> None:
    rendezvous_file(run, memory, first=True).publish(RENDEZVOUS)
    with pytest.raises(RunError, match=r"port 12345 of node1, 10\.0\.0\.1.*job\.interface"):
        rendezvous_file(run, memory, first=True).meet(nowhere, 0.1)


def test_a_stale_handle_is_read_again(
    run: RunDirectory, memory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = rendezvous_file(run, memory, first=True)
    first.publish(RENDEZVOUS)
    import hpcrun.run.rendezvous as module

    real, calls = module.read_json, []

    def stale_once(path: Path) -> object:
        calls.append(time.monotonic())
        if len(calls) == 1:
            raise OSError(116, "Stale file handle")
        return real(path)

    monkeypatch.setattr(module, "read_json", stale_once)
    assert first.wait(60) == RENDEZVOUS
    assert len(calls) == 2


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("met", ["before", "after"])
def test_a_waiting_rank_sees_the_end_of_rank_0(
    run: RunDirectory, memory: Path, first: bool, met: str
) -> None:
    rank_0, tried = rendezvous_file(run, memory, first=True), []
    rank_0.publish(RENDEZVOUS)

    def connect(address: str, rendezvous: Rendezvous, patience: float) -> None:
        tried.append(address)
        rank_0.publish_end("stopped")
        rank_0.clear()

    if met == "after":
        connect("", RENDEZVOUS, 0.0)
    with pytest.raises(ScriptEnded) as ended:
        rendezvous_file(run, memory, first=first, second_look=0.3).meet(connect, 600)
    assert ended.value.rendezvous.end == "stopped"
    assert tried[1:] == ([] if met == "after" else ["10.0.0.1"])


def test_an_earlier_step_s_end_is_not_this_step_s(run: RunDirectory, memory: Path) -> None:
    rank_0 = rendezvous_file(run, memory, first=True, step="1")
    rank_0.publish(RENDEZVOUS)
    rank_0.publish_end("done")
    met = rendezvous_file(run, memory, first=True, step="2").meet(lambda address, *_: address, 10)
    assert met == "node1"


@pytest.mark.parametrize("published", [True, False])
@pytest.mark.parametrize("first", [True, False])
def test_a_stop_signal_ends_the_wait_for_rank_0(
    run: RunDirectory, memory: Path, published: bool, first: bool
) -> None:
    if published:
        rendezvous_file(run, memory, first=True).publish(RENDEZVOUS)
    told = iter([False, False])
    with pytest.raises(RendezvousStopped):
        rendezvous_file(run, memory, first=first).meet(nowhere, 600, stop=lambda: next(told, True))
