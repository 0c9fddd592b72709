"""A submitit job with ``hpcrun.resumable``: submitit's own handler requeues it after the save."""

import os
import pickle
import signal

import pytest
import submitit
import torch.distributed as dist
from submitit.core.submission import process_job
from submitit.core.utils import DelayedSubmission
from submitit.local.local import LOCAL_REQUEUE_RETURN_CODE

from hpcrun.ranks.collective import StopAgreement
from hpcrun.ranks.signals import STOP, StopFlag, StopReason
from tests.support.on_ranks import forked, ranks
from tests.support.training.forks import fork_ranks

from . import loops


class Training(submitit.helpers.Checkpointable):
    """A training as a submitit user writes it; its first start gets the warning, on rank 1 only."""

    def __init__(self, folder, start=0):
        self.folder, self.start = folder, start

    def __call__(self):
        rank = submitit.JobEnvironment().global_rank
        store = f"file://{self.folder}/store-{self.start}"
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
        at = loops.nothing if self.start else loops.stop(6, signal.SIGUSR2, rank=1)
        return loops.classic(self.folder / "cut", at, workers=0)

    def checkpoint(self):
        return DelayedSubmission(Training(self.folder, self.start + 1))


@forked
def test_submitit_requeues_after_the_save(tmp_path):
    delayed = DelayedSubmission(Training(tmp_path))
    delayed.set_timeout(60, 3)
    delayed.dump(tmp_path / "7_submitted.pkl")

    def task(rank):
        """Run what a task of submitit's LocalExecutor runs."""
        names = {"JOB_ID": 7, "NTASKS": 2, "GLOBALID": rank, "LOCALID": rank}
        os.environ |= {f"SUBMITIT_LOCAL_{name}": str(value) for name, value in names.items()}
        os.environ |= {"SUBMITIT_EXECUTOR": "local", "RANK": str(rank), "WORLD_SIZE": "2"}
        process_job(tmp_path)

    assert fork_ranks(2, task) == [LOCAL_REQUEUE_RETURN_CODE, 75]
    assert fork_ranks(2, task) == [0, 0]
    ends = [pickle.loads((tmp_path / f"7_{rank}_result.pkl").read_bytes()) for rank in range(2)]
    undisturbed = Training(tmp_path, 2)
    undisturbed.folder = tmp_path / "whole"
    undisturbed.folder.mkdir()
    calm = DelayedSubmission(undisturbed)
    calm.set_timeout(60, 3)
    calm.dump(tmp_path / "7_submitted.pkl")
    assert fork_ranks(2, task) == [0, 0]
    whole = [pickle.loads((tmp_path / f"7_{rank}_result.pkl").read_bytes()) for rank in range(2)]
    assert ends == whole
    assert ends[0] == ends[1]
    assert ends[0][0] == "success"


@forked
def test_only_the_handlers_of_the_program_are_called():
    called = []

    def note(number, frame):
        called.append((frame is not None, number))

    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    flag = StopFlag()
    flag.install()
    assert flag.replaced == ()
    signal.signal(signal.SIGTERM, note)
    signal.signal(signal.SIGUSR2, note)
    STOP.install()
    flag.install()  # replaces hpcrun's own handlers only
    assert flag.replaced == ()
    STOP.install()
    assert STOP.replaced == (signal.SIGTERM, signal.SIGUSR2)
    # Only SIGUSR2 has a handler; a signal without one calls none.
    other = StopFlag()
    other.keep(signal.SIGUSR2, note)
    other.install()
    signal.raise_signal(signal.SIGUSR1)
    other.hand_over(StopReason.WARNING)
    assert called == []
    STOP.install()
    # No signal yet: the reason of another rank decides.
    STOP.hand_over(StopReason.WARNING)
    signal.raise_signal(signal.SIGTERM)
    agreement = StopAgreement(None)
    assert agreement.exchange(1, STOP.reason) is StopReason.TERMINATE
    agreement.hand_over()
    assert called == [(True, signal.SIGUSR2), (True, signal.SIGTERM)]


@ranks(1)
def test_a_handler_that_is_set_later_runs_after_the_save(tmp_path):
    seen = []

    def interrupt(steps):
        if steps == 2:
            signal.signal(
                signal.SIGTERM, lambda *_: seen.append((tmp_path / "step-000000004").exists())
            )
        if steps == 4:
            signal.raise_signal(signal.SIGTERM)

    with pytest.raises(SystemExit) as ended:
        loops.classic(tmp_path, interrupt, workers=0, wrap="plain")
    assert (ended.value.code, seen) == (75, [True])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert (STOP.take_over(), STOP.take_over()) == (["SIGUSR1"], [])
