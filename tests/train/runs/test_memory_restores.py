"""Whole runs that are killed, and start again from the memory of the job."""

import os
import signal
import time

import pytest

from hpcrun import exit_codes
from hpcrun.checkpoint.memory.copies import MemoryCopies
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.ranks.collective import Ranks
from hpcrun.run.files import read_lines
from hpcrun.run.memory_keeper import VARIABLE, KeeperClient, new_key
from tests.checkpoint.keepers import FILES, keeper, stored
from tests.support import jobs
from tests.support.on_ranks import forked
from tests.support.training.faulty_tasks import Regression
from tests.support.training.runs import DONE, play_run

KILLED = [-signal.SIGKILL] * 2
RUN = "HPCRUN_TEST_RUN"


class Killed(Regression):
    """The task of random samples; in the first attempt SIGKILL ends its ranks in the sixth step."""

    def mishap(self):
        key = os.environ.get(VARIABLE)
        if key and self.calls == 6 and os.environ["SLURM_RESTART_COUNT"] == "0":
            client = KeeperClient(key, os.environ[RUN])
            while FILES not in stored(client).values():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("parallel", [pytest.param("fsdp", marks=pytest.mark.slow), "ddp"])
@forked
def test_a_killed_run_continues_from_memory_with_the_same_bits(tmp_path, parallel):
    options = [f"train.parallel={parallel}", "checkpoint.every=0", "train.log_every=1"]
    calm = play_run(tmp_path, Killed, *options, name="calm")
    with keeper() as (client, _):

        def begin(rank, restart):
            os.environ |= {VARIABLE: client.key, RUN: str(tmp_path / "killed")}

        memory = ["checkpoint.memory_every=1"]
        killed = play_run(tmp_path, Killed, *options, *memory, name="killed", begin=begin)
    assert calm.codes == DONE, calm.said()
    assert killed.codes == [KILLED, *DONE], killed.said()
    first, second = (event.step for event in killed.events("started"))
    assert (first, second > 0) == (0, True)
    assert f"step {second} was read from memory (none is on disk)" in killed.said()
    assert jobs.final_state(killed.run) == jobs.final_state(calm.run)

    # No event counts a snapshot in memory as a save, and every step has its line.
    assert [event.step for event in killed.events("saved")] == [8]
    losses = [
        {line["step"]: line["loss"] for line in read_lines(played.run.metrics)}
        for played in (calm, killed)
    ]
    assert list(losses[0]) == list(range(1, 9))
    assert losses[0] == losses[1]


@forked
def test_a_rank_that_loses_its_peer_leaves_the_last_snapshot(tmp_path):
    with keeper() as (client, _):

        def begin(rank, restart):
            os.environ[VARIABLE] = client.key
            if (rank, restart) == (0, 0):
                keep, calls = MemoryCopies.keep, []

                def killed_at_the_second(*arguments):
                    calls.append(1)
                    if len(calls) == 2:
                        os.kill(os.getpid(), signal.SIGKILL)
                    return keep(*arguments)

                MemoryCopies.keep = killed_at_the_second

        options = ["checkpoint.every=0", "checkpoint.memory_every=1"]
        played = play_run(tmp_path, Regression, *options, begin=begin)
    assert played.codes == [[-signal.SIGKILL, exit_codes.FAILED], *DONE], played.said()
    assert "was read from memory" in played.said()


def snapshot_each_step():
    """Let each snapshot in memory wait for the one before, which would otherwise skip it."""
    ready = CheckpointEngine.ready_for_memory

    def ready_later(engine):
        while engine.under_way:
            time.sleep(0.001)
        return ready(engine)

    CheckpointEngine.ready_for_memory = ready_later


def kill_at(number, owner, name, which=1):
    """Kill this rank in the method ``name`` of ``owner``, when it is called for the time ``which``.

    Args:
        number: the call to a keeper or to the other ranks, before which the rank is killed.
    """
    method, entered, calls = getattr(owner, name), [], []

    def entering(*arguments):
        entered.append(1)
        return method(*arguments)

    def dying(call):
        def before(*arguments, **named):
            if len(entered) == which:
                calls.append(1)
            if len(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **named)

        return before

    setattr(owner, name, entering)
    for kind, names in ((KeeperClient, "put files open only"), (Ranks, "gather from_rank_0")):
        for each in names.split():
            setattr(kind, each, dying(getattr(kind, each)))


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("during", ["snapshot", "restore"])
@forked(limit=1800)
def test_a_kill_at_each_step_of_memory_loses_nothing(tmp_path, during, victim):
    options = ["checkpoint.every=0", "checkpoint.memory_every=1", "checkpoint.memory_copies=1"]
    calm = play_run(tmp_path, Regression, name="calm", nodes=[2])
    kills = 1 if during == "snapshot" else 2
    for number in range(1, 25):
        key = new_key()

        def begin(rank, restart, key=key, number=number):
            os.environ |= {VARIABLE: key, "SLURMD_NODENAME": f"node{rank}"}
            snapshot_each_step()
            if (rank, restart) == (victim, 0):
                kill_at(number if kills == 1 else 5, MemoryCopies, "keep", 2)
            elif (rank, restart) == (victim, kills - 1):
                kill_at(number, MemoryCopies, "restore")

        with keeper(f"{key}/node0"), keeper(f"{key}/node1"):
            played = play_run(
                *(tmp_path, Regression, *options),
                **{"name": str(number), "nodes": [2, 2, 2], "begin": begin, "victim": victim},
            )
        if len(played.codes) == kills:
            break
        assert [codes[victim] for codes in played.codes[:-1]] == [-signal.SIGKILL] * kills
        assert played.codes[-1:] == DONE, played.said()
        assert "was read from memory (none is on disk)" in played.said()
        assert jobs.final_state(played.run) == jobs.final_state(calm.run)
    print(f"{during}: rank {victim} was killed at {number - 1} places")
    assert number > 6, played.said()


@pytest.mark.parametrize("every", [0, 8], ids=["no interval", "at the interval"])
@forked
def test_the_last_save_keeps_no_copy_in_memory(tmp_path, every):
    with keeper() as (client, _):

        def begin(rank, restart):
            os.environ[VARIABLE] = client.key
            keep = MemoryCopies.keep

            def told(copies, snapshot, *others):
                print(f"kept step {snapshot.step}", flush=True)
                return keep(copies, snapshot, *others)

            MemoryCopies.keep = told

        options = [f"checkpoint.every={every}", "checkpoint.memory_every=2"]
        played = play_run(tmp_path, Regression, *options, begin=begin)
    assert played.codes == DONE, played.said()
    assert [event.step for event in played.events("saved")] == [8]
    # A snapshot is skipped while a save is pending.
    assert "kept step 2" in played.said()
    assert "kept step 8" not in played.said()


@forked
def test_memory_every_without_a_keeper_is_reported(tmp_path):
    played = play_run(tmp_path, Regression, "checkpoint.memory_every=2")
    assert played.codes == DONE
    assert played.line_with("checkpoint.memory_every").startswith(
        "hpcrun: checkpoint.memory_every: has no effect: "
    )
