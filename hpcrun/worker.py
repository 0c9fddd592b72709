"""Entry point of every rank: ``python -m hpcrun.worker RUN``, for every launcher."""

import atexit
import faulthandler
import os
import sys
from pathlib import Path
from typing import NoReturn

from hpcrun.ranks import fork_client
from hpcrun.ranks.fork_messages import TEMPLATE
from hpcrun.ranks.signals import STOP, end_helpers


def main() -> NoReturn:
    """Install the signal flags before slow imports, then train."""
    grow_memory()
    if TEMPLATE in os.environ:
        from hpcrun.ranks.fork_template import wait_for_ranks

        wait_for_ranks(import_all, prepare_forked)
    else:
        STOP.install()
        fork_client.become_forked()
    STOP.install()
    if name := os.environ.pop("HPCRUN_JOB_NAME", None):
        os.environ["SLURM_JOB_NAME"] = name
    from hpcrun.run.streams import outlive_full_disk

    outlive_full_disk()
    # If C code ends the process, the log shows the Python line that called it.
    faulthandler.enable(file=2)
    # torch.distributed.launch without --use-env passes the local rank this way too.
    given = [word for word in sys.argv[1:] if not word.startswith("--local-rank=")]
    if len(given) != 1:
        raise SystemExit("usage: python -m hpcrun.worker RUN_DIRECTORY")
    STOP.take_interrupt()
    leave(train_here(Path(given[0])))


def grow_memory() -> None:
    """Let torch's allocator of GPU memory grow its segments, unless the user has configured the allocator.

    Fixed segments leave gaps if the sizes of tensors vary. torch reads the variable when it uses a GPU first.
    Source: torch's page "CUDA semantics", ``expandable_segments``.
    """
    if not any(f"PYTORCH_{kind}ALLOC_CONF" in os.environ for kind in ("", "CUDA_", "HIP_")):
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def import_all() -> None:
    """Import what a rank imports before its first step, except its task."""
    import numpy.ma  # noqa: F401, numpy.unique imports it

    import hpcrun.job.ownership
    import hpcrun.train.entry
    import hpcrun.train.session  # noqa: F401
    from hpcrun.config import resolve

    resolve([])  # The config's engine makes the validators at the first use.


def prepare_forked() -> str:
    """Prepare the variables and CPUs of a forked rank; return OMP_NUM_THREADS. Raises UserError."""
    from hpcrun.train.entry import prepare_forked

    return prepare_forked(Path(sys.argv[-1]))


def train_here(run: Path) -> int:
    """Train this process's rank of ``run`` and return the exit code."""
    from hpcrun.job.ownership import harmless_code
    from hpcrun.run.directory import RunDirectory
    from hpcrun.train.entry import run_rank

    return harmless_code(RunDirectory(run.absolute()), os.environ, run_rank(run, STOP))


def leave(code: int) -> NoReturn:
    """Exit without interpreter shutdown, which takes seconds on a full node once torch is loaded.

    Exit functions of libraries (loggers that upload) still run.
    """
    end_helpers()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
