"""Entry point of every rank: ``python -m hpcrun.worker RUN``, for every launcher.

A batch step and the controller of the local cluster prepare an attempt, and record its end. Where there is
neither, this module does both around the rank: so it may import both halves of hpcrun.
"""

import atexit
import faulthandler
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hpcrun import exit_codes
from hpcrun.ranks import fork_client
from hpcrun.ranks.fork_messages import TEMPLATE
from hpcrun.ranks.signals import STOP, StopFlag, end_helpers

if TYPE_CHECKING:
    from hpcrun.config import Config
    from hpcrun.ranks.distributed import DistributedConfig
    from hpcrun.run.attempt import Attempt
    from hpcrun.run.directory import RunDirectory
    from hpcrun.train.position import Position


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

    import hpcrun.run.journal.opening
    import hpcrun.train.environment
    import hpcrun.train.failures
    import hpcrun.train.session  # noqa: F401
    from hpcrun.config import resolve

    resolve([])  # The config's engine makes the validators at the first use.


def prepare_forked() -> str:
    """Prepare the variables and CPUs of a forked rank; return OMP_NUM_THREADS. Raises UserError."""
    from hpcrun.train.environment import prepare_forked

    return prepare_forked(Path(sys.argv[-1]))


def train_here(run: Path) -> int:
    """Train this process's rank of ``run`` and return the exit code."""
    from hpcrun.run.directory import RunDirectory

    return harmless_code(RunDirectory(run.absolute()), os.environ, run_rank(run, STOP))


def run_rank(path: Path, flag: StopFlag) -> int:
    """Train this process's rank of the run at ``path`` and return the exit code (see exit_codes).

    Never raises: a failure is recorded in the attempt's log folder and printed.
    """
    from hpcrun.errors import UserError
    from hpcrun.run.attempt import IN_PLACE, Attempt
    from hpcrun.run.directory import RunDirectory, RunError
    from hpcrun.run.streams import copied_to
    from hpcrun.run.trust import SUBMITTED, ForeignRun
    from hpcrun.slurm.placement import scheduler
    from hpcrun.train.environment import describe, enter_folder, job_by_hand, own_config
    from hpcrun.train.failures import record_refusal, refuse

    run = RunDirectory(path.absolute())
    try:
        if not run.exists():
            raise RunError(f"{path}: no such run; make it with `hpcrun submit`")
        config = own_config(run)
        # A program that this rank starts may train another run.
        os.environ.pop(SUBMITTED, None)
        enter_folder(run)
        distributed = describe(config)
        by_hand = scheduler(os.environ) == "direct"
        job = job_by_hand(run, config, distributed) if by_hand else distributed.job_id
    except ForeignRun as error:
        # Nothing is written into a folder of another user.
        return refuse(error)
    except UserError as error:
        record_refusal(run, error)
        return refuse(error)
    in_place = 0 if by_hand else int(os.environ.get(IN_PLACE) or 0)
    attempt = Attempt(str(job), distributed.restart_count, in_place)
    if not by_hand and distributed.launch_method != "torchrun":
        return run_attempt(run, attempt, config, distributed, flag)
    # If a scheduler starts the ranks, it keeps their logs itself. torchrun mixes the output of its ranks.
    logs = run.attempt_logs(attempt)
    with copied_to(logs / f"rank-{distributed.rank:05d}.log"):
        code = run_attempt(run, attempt, config, distributed, flag)
        if distributed.rank == 0:
            try:
                end_by_hand(run, attempt, code)
            except OSError as error:  # The training keeps its exit code.
                from hpcrun.printing import say_aside

                say_aside(f"hpcrun: the end of the attempt is not recorded: {error}")
    return code


def run_attempt(
    run: "RunDirectory",
    attempt: "Attempt",
    config: "Config",
    distributed: "DistributedConfig",
    flag: StopFlag,
) -> int:
    """Run the attempt; turn every exception into a record and an exit code."""
    from hpcrun.train.failures import recorded_failures

    def work(position: "Position") -> int:
        return _run(run, attempt, config, distributed, flag, position)

    return recorded_failures(run, attempt, distributed.rank, work)


def _run(
    run: "RunDirectory",
    attempt: "Attempt",
    config: "Config",
    distributed: "DistributedConfig",
    flag: StopFlag,
    position: "Position",
) -> int:
    """Open the attempt on rank 0, check the node, and run the command or the training."""
    from hpcrun.errors import error_on_all_ranks
    from hpcrun.run.attempt import other_tasks
    from hpcrun.run.journal.opening import already_finished
    from hpcrun.train import environment

    if already_finished(run, attempt):
        if distributed.rank == 0:
            print(f"hpcrun: {run.name}: the training is done already", flush=True)
        return exit_codes.DONE
    if distributed.launch_method == "slurm" and (
        line := other_tasks(os.environ, distributed.world_size)
    ):
        raise error_on_all_ranks(line, distributed.rank)
    if distributed.rank == 0:
        open_here(run, attempt, config, distributed)
    environment.require_node(config, distributed)
    if config.command:
        from hpcrun.train.command import run_command

        return run_command(config, run, attempt, distributed, flag)
    environment.require_fit(config, distributed)
    environment.prepare_environment(distributed, bind=config.train.affinity)
    environment.print_without_gpu(distributed)
    from hpcrun.train.session import train

    def on_exit() -> None:
        if distributed.rank == 0:
            end_by_hand(run, attempt, exit_codes.FAILED)

    return train(run, attempt, config, distributed, flag, position, on_exit)


def open_here(
    run: "RunDirectory",
    attempt: "Attempt",
    config: "Config",
    distributed: "DistributedConfig",
) -> None:
    """Open the attempt on rank 0, which first prepares the attempt if no batch step has.

    Raises:
        Occupied: another job has the run, or this job is cancelled.
        Refused: a budget is used up; or this attempt was opened before.
        OSError: the run directory cannot be written.
    """
    from hpcrun.run.journal.journal import Journal
    from hpcrun.run.journal.opening import become_owner
    from hpcrun.slurm.placement import scheduler

    # The nodes of the step, not all those of the job.
    hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    facts = {
        "script": bool(config.command),
        "executor": scheduler(os.environ),
        "pid": os.getpid(),
        "ranks": distributed.world_size,
        "nodes": distributed.num_nodes,
        "hosts": hosts if distributed.launch_method == "slurm" else None,
    }
    state = Journal(run).read()
    if state.is_prepared(attempt):
        state = become_owner(run, attempt, state, **facts)
    else:
        from hpcrun.job.opening import open_attempt
        from hpcrun.job.policy import Budgets

        state = open_attempt(run, attempt, Budgets.of(config), state, **facts)
    if attempt.in_place and state.asked_to_requeue(attempt):
        # `hpcrun preempt` came between two attempts and found no rank to signal.
        signal.raise_signal(signal.SIGUSR2)


def end_by_hand(run: "RunDirectory", attempt: "Attempt", code: int) -> None:
    """Record the end of an attempt that a person started; a scheduler's attempts end outside their ranks.

    Raises:
        OSError: the run directory cannot be written.
    """
    from hpcrun.slurm.placement import scheduler

    if scheduler(os.environ) == "direct":
        from hpcrun.job.finalize import finalize

        finalize(run, attempt, code, None)


def harmless_code(run: "RunDirectory", environ: Mapping[str, str], code: int) -> int:
    """Return the exit code for a rank that would exit with ``code``: 0 if a newer attempt owns the run.

    After a failed task, srun ends the step by its name, and the newer attempt's step has the same name
    (observed with Slurm 22.05, when a node returned that was taken for dead): the stale rank would kill
    the newer attempt.
    """
    from hpcrun.run.attempt import attempt_here
    from hpcrun.run.journal.journal import Journal
    from hpcrun.slurm.placement import job_id, scheduler

    job = job_id(environ)
    if code == exit_codes.DONE or job is None or scheduler(environ) != "slurm":
        return code
    attempt = attempt_here(job, environ)
    newer = Journal(run).read().successor(attempt)
    if newer is None:
        return code
    print(
        f"hpcrun: {newer.owner} owns the run now; {attempt.owner} exits",
        file=sys.stderr,
        flush=True,
    )
    return exit_codes.DONE


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
