"""Run one rank of one attempt, from its environment to the exit code. Imports torch as late as possible."""

import os
import signal
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from hpcrun import exit_codes
from hpcrun.config import Config
from hpcrun.devices.affinity import bind_rank, cpus_of_rank
from hpcrun.devices.devices import missing_driver, require_given_gpus, visible_gpus
from hpcrun.diagnose.causes import is_cascade
from hpcrun.diagnose.mistakes import is_mistake, may_pass_by_cause, passing
from hpcrun.errors import (
    ClusterError,
    ErrorOnAllRanks,
    NodeUnfit,
    NotTrainable,
    PeerFailed,
    PlannedStop,
    PrintedByRankZero,
    UserError,
    error_on_all_ranks,
)
from hpcrun.job.finalize import finalize
from hpcrun.job.opening import already_finished, open_attempt
from hpcrun.job.ownership import Occupied
from hpcrun.job.policy import Budgets
from hpcrun.job.script.command import Launcher, launching_python
from hpcrun.job.script.run import ScriptTerms, run_script
from hpcrun.printing import say_aside
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import (
    interface_variables,
    own_interfaces,
)
from hpcrun.ranks.signals import StopFlag, end_helpers
from hpcrun.run.attempt import IN_PLACE, Attempt, attempt_here, other_tasks
from hpcrun.run.directory import RunDirectory, RunError, read_record
from hpcrun.run.endings import node_name, record_failure
from hpcrun.run.journal.events import BadInput, Saved, Started
from hpcrun.run.journal.journal import Journal, job_of_process
from hpcrun.run.snapshot import copied_path, import_folders, recorded_snapshot, snapshot_command
from hpcrun.run.streams import copied_to
from hpcrun.run.trust import SUBMITTED, ForeignRun, require_own_code
from hpcrun.slurm.own_config import load_own
from hpcrun.slurm.placement import read_placement, scheduler
from hpcrun.storage.errors import ReadFailure
from hpcrun.storage.manifest import newest_manifest
from hpcrun.train.position import Position


def run_command(
    config: Config,
    run: RunDirectory,
    attempt: Attempt,
    distributed: DistributedConfig,
    flag: StopFlag,
) -> int:
    """Run ``config.command`` until it ends or must stop; return the exit code (see exit_codes)."""
    launcher = _launcher(config, distributed)
    command = _as_submitted(run, config.command, launcher)
    # The ranks that a task starts inherit its variables.
    if distributed.local_rank == 0 and not config.job.cpu and (line := missing_driver(os.environ)):
        print(f"hpcrun: {line}", file=sys.stderr, flush=True)
    started = max(1, config.job.gpus // config.job.tasks_on_node)
    prepare_environment(distributed, bind=False, started=started)
    return run_script(command, run, attempt, distributed, flag, _terms(config), launcher)


def _launcher(config: Config, distributed: DistributedConfig) -> Launcher | None:
    """Return the launcher of the command's ranks; raises UserError if the ranks are already started."""
    job = config.job
    if job.launcher is None:
        return None
    if distributed.launch_method == "torchrun":
        raise UserError(
            f"job.launcher: {job.launcher}, but torchrun has started this rank already; submit the run with "
            "`hpcrun submit`, or with sbatch/train.sbatch"
        )
    return Launcher(job.launcher, job.gpus, launching_python(job.python, job.launcher))


def _as_submitted(run: RunDirectory, command: list[str], launcher: Launcher | None) -> list[str]:
    """Return the command with the snapshot's copies in place of the files that it names."""
    snapshot = recorded_snapshot(run)
    if snapshot is None:
        return command
    before = [launcher.python] if launcher else []
    words, variables = snapshot_command(snapshot, [*before, *command], Path.cwd())
    os.environ.update(variables)
    return words[len(before) :]


def _terms(config: Config) -> ScriptTerms:
    """Return the time limits and the signal for the script."""
    job = config.job
    return ScriptTerms(
        timeout=config.train.timeout,
        # If the scheduler gives less time, it ends the script earlier.
        grace=max(float(job.signal_lead), float(job.kill_wait), job.grace),
        warning=signal.Signals[f"SIG{config.warn_signal}"],
        interface=job.interface,
        zero_finishes=job.zero_after_signal == "finished",
        silent_after=job.silent_after,
    )


def run_rank(path: Path, flag: StopFlag) -> int:
    """Train this process's rank of the run at ``path`` and return the exit code (see exit_codes).

    Never raises: a failure is recorded in the attempt's log folder and printed.
    """
    run = RunDirectory(path.absolute())
    try:
        if not run.exists():
            raise RunError(f"{path}: no such run; make it with `hpcrun submit`")
        config = _own_config(run)
        # A program that this rank starts may train another run.
        os.environ.pop(SUBMITTED, None)
        enter_folder(run)
        distributed = describe(config)
        by_hand = scheduler(os.environ) == "direct"
        job = _job_by_hand(run, config, distributed) if by_hand else distributed.job_id
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
        if by_hand and distributed.rank == 0:
            try:
                finalize(run, attempt, code, None)
            except OSError as error:  # The training keeps its exit code.
                say_aside(f"hpcrun: the end of the attempt is not recorded: {error}")
    return code


def _own_config(run: RunDirectory) -> Config:
    """Return the config of a run of this user; raises UserError."""
    try:
        return load_own(run)
    except OSError as error:
        raise RunError(f"{run.config}: cannot be read: {error.strerror}; check the disk") from error


def _job_by_hand(run: RunDirectory, config: Config, distributed: DistributedConfig) -> str:
    """Return a name in place of a job id: that of the process that started the ranks of rank 0's host.

    Raises:
        ClusterError: another host cannot be reached, or this rank has started twice.
    """
    if distributed.num_nodes > 1:
        # Must come before torch; the later call then changes nothing.
        prepare_environment(distributed, bind=config.train.affinity and not config.command)
        from hpcrun.train.parallel.hosts import agree_on_job

        starter = partial(job_of_process, run, os.getppid())
        return agree_on_job(distributed, starter, timeout=config.train.connect_timeout)
    # Several ranks cannot choose a free name: rank 0 may have taken the name already.
    return job_of_process(run, os.getpid()) if distributed.world_size == 1 else f"pid{os.getppid()}"


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
        return exit_codes.BAD_INPUT
    except ReadFailure as error:
        # The nodes that failed to read are the cause, not the run: another start on other nodes may help.
        failed = error if error.here else PeerFailed(f"another rank could not read: {error}")
        return fail(run, attempt, rank, failed, position)
    except UserError as error:
        # If the run has trained before, this node is the cause, not the config.
        unfit = isinstance(error, NodeUnfit)
        # The nodes of an earlier start were fit, or may have been.
        worked = attempt.label != "0" or has_trained(run, attempt)
        own = error.certain or isinstance(error, RunError)  # For example checkpoints that are gone.
        if not own and (may_pass_by_cause(error) or passing(error) == "node"):
            # For example a task that reads its tokenizer from a server, or data that are not mounted here.
            return fail(run, attempt, rank, error, position)
        if rank == 0 and not (unfit and worked):
            end_helpers()  # As in fail(): the error may come from a step.
            if not isinstance(error, Occupied):
                note_refusal(run, attempt, error)
            return refuse(error)
        # A problem of this rank only: another start may help on another node.
        code = fail(run, attempt, rank, error, position, bad_input=unfit and not worked)
        return exit_codes.BAD_INPUT if isinstance(error, NotTrainable) else code
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
        return exit_codes.DONE
    if distributed.launch_method == "slurm" and (
        line := other_tasks(os.environ, distributed.world_size)
    ):
        raise error_on_all_ranks(line, distributed.rank)
    if distributed.rank == 0:
        budgets = Budgets(**config.restarts.budgets, script=bool(config.command))
        open_attempt(
            run,
            attempt,
            budgets,
            script=bool(config.command),
            executor=scheduler(os.environ),
            pid=os.getpid(),
            ranks=distributed.world_size,
            nodes=distributed.num_nodes,
            hosts=_slurm_hosts(distributed),
        )
        if attempt.in_place and Journal(run).read().asked_to_requeue(attempt):
            # `hpcrun preempt` came between two attempts and found no rank to signal.
            signal.raise_signal(signal.SIGUSR2)
    require_node(config, distributed)
    if config.command:
        return run_command(config, run, attempt, distributed, flag)
    require_fit(config, distributed)
    prepare_environment(distributed, bind=config.train.affinity)
    print_without_gpu(distributed)
    from hpcrun.train.session import train

    return train(run, attempt, config, distributed, flag, position)


def _slurm_hosts(distributed: DistributedConfig) -> str | None:
    """Return the nodes of the ranks as Slurm writes a list of hosts; None if Slurm did not start them."""
    # Not the nodes of the job that this step leaves out.
    hosts = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST")
    return hosts if distributed.launch_method == "slurm" else None


def has_trained(run: RunDirectory, attempt: Attempt) -> bool:
    """Return True if a start before ``attempt`` reached its steps; then a node may have caused an error."""
    if newest_manifest(run.checkpoints) is not None:
        return True
    try:
        return any(
            event.attempt != attempt for event in Journal(run).read().of_kind(Started, Saved)
        )
    except OSError:
        return True


def refuse(error: UserError) -> int:
    """Print ``error`` and return the exit code for bad input."""
    say_aside(f"hpcrun: {error}")
    return exit_codes.BAD_INPUT


def note_refusal(run: RunDirectory, attempt: Attempt, error: UserError) -> None:
    """Write rank 0's event ``bad-input``, with the facts about nodes that the classification needs."""
    known = error if isinstance(error, ErrorOnAllRanks) else None
    refused = BadInput(
        attempt=attempt,
        reason=str(error),
        kind=type(error).__name__,
        host=(known and known.host) or node_name(),
        certain=error.certain,
    )
    Journal(run).note(refused)


def record_refusal(run: RunDirectory, error: UserError) -> None:
    """Record the failure of a rank that ends before its attempt has begun."""
    if scheduler(os.environ) == "direct" or not run.exists():
        return
    try:
        here = read_placement(os.environ)
        if here.job_id is not None:
            folder = run.attempt_logs(attempt_here(here.job_id, os.environ))
            plain = error.with_traceback(None)
            why = passing(error)
            bad = not why and not may_pass_by_cause(error)
            record_failure(folder, here.rank, plain, None, bad_input=bad, passing=why)
    except (UserError, OSError) as problem:
        print(f"hpcrun: cannot record the refusal: {problem}", file=sys.stderr, flush=True)


def fail(
    run: RunDirectory,
    attempt: Attempt,
    rank: int,
    error: BaseException,
    position: Position,
    *,
    bad_input: bool = False,
) -> int:
    """Record and print ``error``; return the exit code."""
    folder = run.attempt_logs(attempt)
    # First: dropping the traceback drops the data loader, which would wait for its processes.
    end_helpers()
    if isinstance(error, PlannedStop):
        error.__traceback__ = None
    try:
        why = "" if bad_input else passing(error)
        failure = record_failure(
            folder, rank, error, position.step, bad_input=bad_input, passing=why
        )
    except OSError as disk:
        print(f"hpcrun: cannot record the failure: {disk}", file=sys.stderr, flush=True)
        raise error from None
    if isinstance(error, UserError):
        print(f"hpcrun: rank {rank}: {error}", file=sys.stderr, flush=True)
    elif isinstance(error, OSError) and str(error.filename).startswith(f"{run.path}/"):
        # The failure is of a disk, not of the program; the record has the traceback.
        file = error.filename2 or error.filename
        reason = f"{file}: {error.strerror}; check its owner and the free space"
        print(f"hpcrun: rank {rank}: {reason}", file=sys.stderr, flush=True)
    elif is_cascade(failure):
        first_line = (failure.message.splitlines() or [""])[0]
        print(f"hpcrun: rank {rank} lost its peers: {first_line}", file=sys.stderr, flush=True)
    else:
        text = failure.traceback or f"{failure.kind}: {failure.message}"
        say_aside(*text.rstrip("\n").split("\n"))
    return exit_codes.BAD_INPUT if bad_input else exit_codes.FAILED


def enter_folder(run: RunDirectory) -> None:
    """Change to the folder of the submission, and put it on the import path.

    The task's module and relative paths are then found, no matter where and how this process was started.
    """
    folder = read_record(run).get("folder")
    if folder is None:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        raise RunError(
            f"{folder}: the folder from which {run.name} was submitted cannot be entered: "
            f"{error.strerror}; restore it, or correct `folder` in {run.record}, without its line sha256"
        ) from error
    snapshot = recorded_snapshot(run)
    if snapshot is not None:
        require_own_code(snapshot)
    copied = snapshot.copy_of(Path(folder)) if snapshot else None
    sys.path.insert(0, str(copied or folder))
    if snapshot is not None:
        # PYTHONPATH or an editable install may also lead to the working tree instead of the snapshot.
        sys.path[:] = copied_path(sys.path, import_folders(), snapshot)


def describe(config: Config) -> DistributedConfig:
    """Return this process's rank and world size, with the config's options for DDP; raises ClusterError."""
    found = DistributedConfig.from_env(cpu=config.job.cpu)
    train = config.train
    return found.model_copy(
        update={
            "find_unused_parameters": train.find_unused_parameters,
            "broadcast_buffers": train.broadcast_buffers,
            "gradient_as_bucket_view": train.gradient_as_bucket_view,
            "bucket_mb": train.bucket_mb,
        }
    )


def require_fit(config: Config, distributed: DistributedConfig) -> None:
    """Check the config against the number of ranks that were started; raises UserError on all of them.

    The config was checked against its own ``job`` section, but a launcher may start other numbers.
    """
    ranks, train = distributed.world_size, config.train
    line = None
    if train.parallel in ("single", "dp") and ranks > 1:
        line = (
            f"train.parallel: {train.parallel}, but {ranks} ranks were started, which would each train "
            "a separate model; start one rank, or set train.parallel=ddp"
        )
    elif train.batch_size < ranks * (1 if _follows(config) else train.accumulation):
        line = (
            f"train.batch_size: {train.batch_size} samples are too few for the {ranks} ranks that were "
            f"started x train.accumulation={train.accumulation}; start fewer ranks"
        )
    if line is not None:
        raise error_on_all_ranks(line, distributed.rank)


def _follows(config: Config) -> bool:
    """Return True if the number of micro-batches follows from the number of ranks."""
    return config.train.micro_batch is not None or config.job.elastic


def require_node(config: Config, distributed: DistributedConfig) -> None:
    """Check that this node has the GPUs and the network that the job needs, and select the network.

    Raises:
        NodeUnfit: the node lacks the GPUs or the network.
    """
    if not config.job.cpu:
        require_given_gpus(os.environ)
    if config.job.interface and distributed.num_nodes > 1 and distributed.launch_method != "local":
        own = own_interfaces()
        os.environ.update(interface_variables(config.job.interface, os.environ, own))


def prepare_environment(distributed: DistributedConfig, *, bind: bool, started: int = 1) -> None:
    """Set what libraries read only once, at import; call it before they start threads.

    Args:
        started: the number of ranks that the program of this task starts.
    """
    gpu = bool(distributed.device_ids)
    index, ranks = distributed.local_rank, distributed.num_gpus_per_node
    if distributed.launch_method == "local":
        # All nodes of the local cluster are this machine.
        index, ranks = distributed.rank, distributed.world_size
    cpus = cpus_of_rank(os.environ, ranks)
    if bind:
        cpus = bind_rank(os.environ, index, ranks, gpu=gpu)
    threads = threads_per_rank(os.environ, cpus, started)
    if not os.environ.get("OMP_NUM_THREADS"):
        os.environ["OMP_NUM_THREADS"] = str(threads)
    if distributed.launch_method == "local":
        # By default gloo binds to the address to which the host's name resolves.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def prepare_forked(path: Path) -> str:
    """Prepare the environment of a forked rank as ``run_rank`` does later; return OMP_NUM_THREADS.

    Raises:
        UserError: the rank cannot train; a fresh process reports the reason.
    """
    config = _own_config(RunDirectory(path.absolute()))
    if config.command:
        raise RunError(f"{path}: a command needs no fork")
    prepare_environment(describe(config), bind=config.train.affinity)
    return os.environ["OMP_NUM_THREADS"]


def print_without_gpu(distributed: DistributedConfig) -> None:
    """Print on rank 0 that the training runs on CPUs, and the reason; nothing with GPUs."""
    if distributed.rank == 0 and not distributed.device_ids:
        seen = visible_gpus(os.environ)
        reason = "no GPU is visible" if not seen else "job.cpu is set"
        ranks = distributed.world_size
        where = "1 rank on the CPU" if ranks == 1 else f"{ranks} ranks on the CPU over gloo"
        print(
            f"hpcrun: {where} ({reason}), threads each: {os.environ['OMP_NUM_THREADS']}",
            flush=True,
        )


def threads_per_rank(environ: Mapping[str, str], cpus: int, ranks: int = 1) -> int:
    """Return the threads of each of ``ranks`` ranks in a task that has ``cpus`` CPUs to itself.

    OMP_NUM_THREADS decides if it is set (its first number: OpenMP allows one per nesting
    level), then SLURM_CPUS_PER_TASK, then ``cpus``.

    Raises:
        ClusterError: the value of a variable is not a positive number.
    """
    asked = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked:
        return _positive("OMP_NUM_THREADS", asked)
    given = environ.get("SLURM_CPUS_PER_TASK", "").strip()
    if given:
        cpus = _positive("SLURM_CPUS_PER_TASK", given)
    return max(1, cpus // ranks)


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ClusterError(f"{name} is {text!r}: expected a positive number; correct or unset it")
    return int(text)
