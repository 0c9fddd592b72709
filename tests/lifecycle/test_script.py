"""What a script's rank takes its end for."""

import signal
import subprocess
import threading
from pathlib import Path

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.lifecycle.script import _Watch
from hpcrun.lifecycle.signals import StopFlag, StopReason
from hpcrun.run.directory import create
from hpcrun.run.events import Attempt


def test_a_script_that_ends_well_on_a_signal_which_its_rank_hears_later_was_told_to_stop(
    tmp_path: Path,
) -> None:
    run, flag = create(tmp_path / "a", "{}\n", {}), StopFlag()
    with subprocess.Popen(["true"]) as child:
        watch = _Watch(child, run, Attempt("7", 0), flag, DistributedConfig())
        threading.Timer(0.3, flag._remember, (signal.SIGUSR2, None)).start()
        assert watch.wait() == 0
    assert flag.reason is StopReason.WARNING
