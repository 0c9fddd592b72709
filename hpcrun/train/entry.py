"""Run one rank of one attempt, from the run directory to the exit code. Imports torch as late as possible."""

import os
import sys
from pathlib import Path

from hpcrun.checkpoint.storage.errors import ReadFailure
from hpcrun.config import Config, load_resolved
from hpcrun.errors import (
    NodeUnfit,
    NotTrainable,
    PeerFailed,
    PrintedByRankZero,
    UserError,
    is_mistake,
)
from hpcrun.job import exitcodes
from hpcrun.job.end.finalize import finalize
from hpcrun.job.opening import already_finished, open_attempt
from hpcrun.job.ownership import Occupied
from hpcrun.job.policy import Budgets, of_script
from hpcrun.printing import say_aside
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.launchers import scheduler
from hpcrun.ranks.signals import StopFlag, end_helpers
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt, job_of_process
from hpcrun.run.io.streams import copied_to
from hpcrun.train.phase import Position
from hpcrun.train.start.command import run_command
from hpcrun.train.start.environment import (
    describe,
    enter_folder,
    prepare_environment,
    print_without_gpu,
    require_fit,
    require_node,
    resolve_interface,
)
from hpcrun.train.start.failures import (
    fail,
    has_started,
    has_trained,
    note_refusal,
    record_refusal,
    refuse,
)


def run_rank(path: Path, flag: StopFlag) -> int:
    """Train this process's rank of the run at ``path`` and return the exit code (see exitcodes).

    Never raises: a failure is recorded in the attempt's log folder and printed.
    """
    run = RunDirectory(path.absolute())
    try:
        if not run.exists():
            raise RunError(f"{path}: no such run; make it with `hpcrun submit`")
        config = load_resolved(run.config)
        enter_folder(run)
        distributed = describe(config)
        by_hand = scheduler(os.environ) == "direct"
        job = _job_by_hand(run, config, distributed) if by_hand else distributed.job_id
    except UserError as error:
        record_refusal(run, error)
        return refuse(error)
    attempt = Attempt(str(job), distributed.restart_count)
    if not by_hand:
        return run_attempt(run, attempt, config, distributed, flag)
    # If a scheduler starts the ranks, it keeps their logs itself.
    logs = run.attempt_logs(attempt.job, attempt.restart)
    with copied_to(logs / f"rank-{distributed.rank:05d}.log"):
        code = run_attempt(run, attempt, config, distributed, flag)
        if distributed.rank == 0:
            try:
                finalize(run, attempt, code, None)
            except OSError as error:  # The training keeps its exit code.
                say_aside(f"hpcrun: the end of the attempt is not recorded: {error}")
    return code


def _job_by_hand(run: RunDirectory, config: Config, distributed: DistributedConfig) -> str:
    """Return a name in place of a job id: that of the process that started the ranks of rank 0's node.

    All nodes must use the same name, since it names the folder of the ranks' records.
    """
    # Several ranks cannot choose a free name: rank 0 may have taken the name already.
    own = job_of_process(run, os.getpid()) if distributed.world_size == 1 else f"pid{os.getppid()}"
    # Without torchrun's agent no store exists yet: rank 0 makes it when training begins.
    if distributed.num_nodes == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return own
    # Must come before torch; the later call then changes nothing.
    prepare_environment(distributed, bind=config.train.affinity and not config.command)
    from hpcrun.train.parallel.process_group import broadcast_word

    try:
        return broadcast_word(distributed, f"hpcrun/slurm/launch/{distributed.restart_count}", own)
    except RuntimeError as error:
        line = (str(error).splitlines() or [""])[0]
        print(f"hpcrun: rank 0 did not send its name: {line}", file=sys.stderr, flush=True)
        return own


def run_attempt(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    distributed: DistributedConfig,
    flag: StopFlag,
) -> int:
    """Run the attempt; turn every exception into a record and an exit code."""
    position, rank = Position(), distributed.rank
    try:
        return _run(run, attempt, config, distributed, flag, position)
    except PrintedByRankZero:
        return exitcodes.BAD_INPUT
    except ReadFailure as error:
        # The nodes that failed to read are the cause, not the run: another start on other nodes may help.
        failed = error if error.here else PeerFailed(f"another rank could not read: {error}")
        return fail(run, attempt, rank, failed, position)
    except UserError as error:
        # If the run has trained before, this node is the cause, not the config.
        unfit, worked = isinstance(error, NodeUnfit), has_started(run, attempt)
        if rank == 0 and not (unfit and worked):
            end_helpers()  # As in fail(): the error may come from a step.
            if not isinstance(error, Occupied):
                note_refusal(run, attempt, error)
            return refuse(error)
        # A problem of this rank only: another start may help on another node.
        code = fail(run, attempt, rank, error, position, bad_input=unfit and not worked)
        return exitcodes.BAD_INPUT if isinstance(error, NotTrainable) else code
    # A task that calls sys.exit(0) is not finished: only the end of training returns DONE.
    except (Exception, SystemExit) as error:
        untrained = not position.step and not has_trained(run, attempt)
        bad_input = untrained and is_mistake(error)
        return fail(run, attempt, rank, error, position, bad_input=bad_input)


def _run(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    distributed: DistributedConfig,
    flag: StopFlag,
    position: Position,
) -> int:
    """Open the attempt on rank 0, check the node, and run the command or the training."""
    if already_finished(run, attempt):
        if distributed.rank == 0:
            print(f"hpcrun: {run.name}: the training is done already", flush=True)
        return exitcodes.DONE
    if distributed.rank == 0:
        budgets = Budgets(**config.restarts.model_dump())
        open_attempt(
            run,
            attempt,
            of_script(budgets) if config.command else budgets,
            script=bool(config.command),
            executor=scheduler(os.environ),
            pid=os.getpid(),
            ranks=distributed.world_size,
            nodes=distributed.num_nodes,
            hosts=_slurm_hosts(distributed),
        )
    config = resolve_interface(config, run, attempt, distributed)
    require_node(config, distributed)
    if config.command:
        return run_command(config, run, attempt, distributed, flag)
    require_fit(config, distributed)
    prepare_environment(distributed, bind=config.train.affinity)
    print_without_gpu(distributed)
    from hpcrun.train.session import train

    return train(run, attempt, config, distributed, flag, position)


def _slurm_hosts(distributed: DistributedConfig) -> str | None:
    """Return the job's nodes if Slurm started the ranks; only then can nodes be recorded as bad."""
    return os.environ.get("SLURM_JOB_NODELIST") if distributed.launch_method == "slurm" else None
