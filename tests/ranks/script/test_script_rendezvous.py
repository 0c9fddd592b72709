"""A rank that looks for rank 0 of a script, and finds that script's end or is asked to stop."""

from __future__ import annotations

import signal
import socket
import sys
from pathlib import Path

import pytest

from hpcrun import exit_codes
from hpcrun.ranks.addresses import port_candidates
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.script.run import RankZeroFailed, ScriptTerms, run_script
from hpcrun.ranks.signals import StopFlag
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.endings import is_cascade, read_failures, record_failure
from hpcrun.run.rendezvous import End, Rendezvous, RendezvousFile
from tests.support.journal import read_events

FIRST = Attempt("7", 0)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create(tmp_path / "a", "{}\n", {})


def start(run: RunDirectory, rank: int, flag: StopFlag) -> int:
    """Start a script that writes a file, as one of two ranks on two nodes."""
    config = DistributedConfig(
        rank=rank, world_size=2, num_nodes=2, node_rank=rank, launch_method="local"
    )
    code = f"open({str(run.path / f'started-{rank}')!r}, 'w')"
    terms = ScriptTerms(timeout=600.0)
    return run_script([sys.executable, "-c", code], run, FIRST, config, flag, terms)


def test_a_script_without_peers_gets_a_port_that_is_free(
    run: RunDirectory, free_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    told = run.path / "port"
    code = f"import os; open({str(told)!r}, 'w').write(os.environ['MASTER_PORT'])"
    command, terms = [sys.executable, "-c", code], ScriptTerms(timeout=600.0)
    config = DistributedConfig(launch_method="single", master_port=free_port)
    with socket.create_server(("127.0.0.1", free_port)):
        assert run_script(command, run, FIRST, config, StopFlag(), terms) == exit_codes.DONE
    assert int(told.read_text()) in port_candidates(f"{run.path} {FIRST.owner}")


def publish(run: RunDirectory, end: End | None) -> None:
    rendezvous_file = RendezvousFile(run, FIRST)
    rendezvous_file.publish(Rendezvous(("127.0.0.1",), 1, script_port=2))
    if end is not None:
        rendezvous_file.publish_end(end)


@pytest.fixture
def told_to_stop(flag: StopFlag) -> StopFlag:
    signal.raise_signal(signal.SIGTERM)
    return flag


def test_a_rank_does_not_start_after_rank_0_has_stopped(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    publish(run, "stopped")
    assert start(run, 1, StopFlag()) == exit_codes.DONE
    assert "rank 0's script has stopped already" in capfd.readouterr().err
    assert not (run.path / "started-1").exists()


def test_a_rank_starts_after_rank_0_has_done_its_part(
    run: RunDirectory, capfd: pytest.CaptureFixture[str]
) -> None:
    publish(run, "done")
    assert start(run, 1, StopFlag()) == exit_codes.DONE
    assert "the script starts without rank 0" in capfd.readouterr().err
    assert (run.path / "started-1").exists()


def test_the_failure_of_rank_0_stays_the_cause_for_ranks(run: RunDirectory) -> None:
    publish(run, "failed")
    with pytest.raises(RankZeroFailed, match="failed before this rank reached it"):
        start(run, 1, StopFlag())
    assert not (run.path / "started-1").exists()
    folder = run.attempt_logs(Attempt("7", 0))
    record_failure(folder, 1, RankZeroFailed("rank 0's script failed"), None)
    (failure,) = read_failures(folder)
    assert is_cascade(failure)


@pytest.mark.parametrize("published", [True, False])
def test_a_rank_asked_to_stop_seeks_no_rank_0(
    run: RunDirectory,
    published: bool,
    told_to_stop: StopFlag,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if published:
        publish(run, None)
    assert start(run, 1, told_to_stop) == exit_codes.DONE
    assert "asked to stop before the script started here (terminate)" in capfd.readouterr().err
    assert not (run.path / "started-1").exists()
    assert read_events(run) == []


def test_rank_0_asked_to_stop_starts_nothing(
    run: RunDirectory, told_to_stop: StopFlag, capfd: pytest.CaptureFixture[str]
) -> None:
    assert start(run, 0, told_to_stop) == exit_codes.DONE
    (event,) = read_events(run)
    assert (event.tag, event.cause) == ("stopped", "terminate")
    assert event.own == {"committed": False, "exit_code": None, "killed": True}
    assert start(run, 1, StopFlag()) == exit_codes.DONE
    assert "rank 0's script has stopped already" in capfd.readouterr().err
    assert not list(run.path.glob("started-*"))
