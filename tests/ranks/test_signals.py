"""Handlers that only set a flag, and a stop that all ranks read at one step."""

import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import torch.distributed as dist

from hpcrun.ranks.collective import StopAgreement
from hpcrun.ranks.signals import StopFlag, StopReason, end_helpers, kill_helpers
from tests.support.on_ranks import ranks


def test_the_weightiest_signal_is_remembered(flag: StopFlag) -> None:
    assert flag.reason is StopReason.NONE
    os.kill(os.getpid(), signal.SIGUSR2)
    assert flag.reason is StopReason.WARNING
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGUSR2)
    assert flag.reason is StopReason.TERMINATE


def test_an_interrupt_stops_unless_a_shell_has_muted_it(flag: StopFlag) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        flag.take_interrupt()
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.reason is StopReason.NONE
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        flag.take_interrupt()
        os.kill(os.getpid(), signal.SIGINT)
        assert flag.reason is StopReason.TERMINATE
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_forked_child_does_not_decide(flag: StopFlag) -> None:
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(int(flag.reason))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_the_worker_survives_a_signal_in_its_first_moments() -> None:
    code = textwrap.dedent(
        """
        import os, signal, sys
        from hpcrun.ranks.signals import STOP
        before = set(sys.modules)
        STOP.install()
        os.kill(os.getpid(), signal.SIGUSR2)
        print(STOP.reason.name, {"torch", "pydantic", "submitit", "numpy"} & before)
        """
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "WARNING set()"


def test_the_log_of_a_crashed_worker_names_the_line(tmp_path: Path) -> None:
    code = textwrap.dedent(
        """
        import os, sys
        from hpcrun import worker
        def train_here(run):
            os.abort()
        worker.train_here = train_here
        sys.argv = ["worker", "RUN"]
        worker.main()
        """
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=tmp_path
    )
    assert ended.returncode == -signal.SIGABRT
    assert "in train_here" in ended.stderr


@ranks(3)
def test_all_ranks_stop_at_the_same_step(rank: int) -> None:
    agreement = StopAgreement(dist.new_group(backend="gloo"))
    # Each of two ranks gets another signal, at a different step.
    signals = {1: (17, StopReason.WARNING), 2: (18, StopReason.TERMINATE)}
    begins, reason = signals.get(rank, (100, StopReason.NONE))
    for step in range(100):
        agreed = agreement.exchange(step, reason if step >= begins else StopReason.NONE)
        if agreed:
            break
    agreement.finish()
    assert (step, agreed) == (18, StopReason.WARNING)


def test_a_process_ends_only_its_own_helpers():
    helper = multiprocessing.get_context("fork").Process(
        target=time.sleep, args=(600,), daemon=True
    )
    helper.start()
    child = os.fork()
    if child == 0:
        end_helpers()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    helper.join(0.2)
    assert helper.is_alive()
    kill_helpers()
    helper.join()
    assert helper.exitcode == -signal.SIGKILL
