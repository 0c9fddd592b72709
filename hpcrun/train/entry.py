"""One rank of one attempt of a run, from its directory to its exit code. Imports torch as late as it can."""

import os
import signal
import sys
from pathlib import Path

from hpcrun.checkpoint.storage.errors import ReadFailure
from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.errors import NodeUnfit
from hpcrun.cluster.hardware.affinity import bind_rank, cpus_of_rank
from hpcrun.cluster.hardware.devices import require_given_gpus, visible_gpus
from hpcrun.cluster.hardware.threads import threads_per_rank
from hpcrun.cluster.launchers import read_placement, scheduler
from hpcrun.cluster.network.interfaces import interface_variables, own_interfaces
from hpcrun.command.launcher import Launcher, launching_python
from hpcrun.config import Config, load_resolved
from hpcrun.diagnose.causes import is_cascade
from hpcrun.errors import UserError
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.end.settle import settle_by_hand
from hpcrun.lifecycle.opening import already_finished, open_attempt
from hpcrun.lifecycle.ownership import Occupied
from hpcrun.lifecycle.policy import Budgets, of_script
from hpcrun.lifecycle.rank.shared_interface import AUTO, NoSharedInterface, shared_interface
from hpcrun.lifecycle.script.running import ScriptTerms, run_script
from hpcrun.lifecycle.second_start import tried_elsewhere
from hpcrun.lifecycle.signals import StopFlag, end_helpers
from hpcrun.printing import say_aside
from hpcrun.run.code.import_path import copied_path, folders
from hpcrun.run.code.snapshot import recorded_snapshot, snapshot_command
from hpcrun.run.commits import newest_commit
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.endings import node_name, record_failure
from hpcrun.run.events import Attempt, job_of_process, note, read_events
from hpcrun.run.io.files import read_json
from hpcrun.run.io.streams import copied_to
from hpcrun.train.errors import (
    KnownToAll,
    NotTrainable,
    PeerFailed,
    SaysAll,
    ToldByRankZero,
    is_mistake,
    known_to_all,
)
from hpcrun.train.phase import Position


def run_rank(path: Path, flag: StopFlag) -> int:
    """Train this process's share of the run at ``path`` and return the exit code (see exitcodes).

    Never raises: a failure is recorded in the attempt's log folder and printed.
    """
    run = RunDirectory(path.absolute())
    try:
        if not run.exists():
            raise RunError(f"{path}: no run lies there; make one with `hpcrun submit`")
        config = load_resolved(run.config)
        enter_folder(run)
        distributed = describe(config)
        by_hand = scheduler(os.environ) == "direct"
        job = _launch(run, config, distributed) if by_hand else distributed.job_id
    except UserError as error:
        _record_refusal(run, error)
        return _refuse(error)
    attempt = Attempt(str(job), distributed.restart_count)
    if not by_hand:
        return _attempt(run, attempt, config, distributed, flag)
    # Where a scheduler starts the ranks it keeps their logs.
    logs = run.attempt_logs(attempt.job, attempt.restart)
    with copied_to(logs / f"rank-{distributed.rank:05d}.log"):
        code = _attempt(run, attempt, config, distributed, flag)
        if distributed.rank == 0:
            settle_by_hand(run, attempt, code)
    return code


def _launch(run: RunDirectory, config: Config, distributed: DistributedConfig) -> str:
    """What stands for the job where there is none: the process that started the ranks of rank 0's node.

    All nodes have to call it alike, or what a rank leaves behind is looked for in another folder.
    """
    # Several ranks cannot look for a new name: rank 0 may have taken the name already.
    own = job_of_process(run, os.getpid()) if distributed.world_size == 1 else f"pid{os.getppid()}"
    # Elsewhere nobody holds a store yet: rank 0 itself makes it when training begins.
    if distributed.num_nodes == 1 or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return own
    # It comes before torch, and finds nothing left to do when it comes again.
    _prepare_environment(distributed, bind=config.train.affinity and not config.command)
    from hpcrun.train.parallel.process_group import broadcast_word

    try:
        return broadcast_word(distributed, f"hpcrun/launch/{distributed.restart_count}", own)
    except RuntimeError as error:
        line = (str(error).splitlines() or [""])[0]
        print(f"hpcrun: rank 0 does not say what it is called: {line}", file=sys.stderr, flush=True)
        return own


def _attempt(
    run: RunDirectory,
    attempt: Attempt,
    config: Config,
    distributed: DistributedConfig,
    flag: StopFlag,
) -> int:
    position = Position()
    try:
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
        config = _with_interface(config, run, attempt, distributed)
        _require_node(config, distributed)
        if config.command:
            launcher = _launcher(config, distributed)
            command = _as_submitted(run, config.command, launcher)
            # The ranks that a task starts inherit its variables.
            started = max(1, config.job.gpus // config.job.tasks_on_node)
            _prepare_environment(distributed, bind=False, started=started)
            terms = _terms(config)
            return run_script(command, run, attempt, distributed, flag, terms, launcher)
        require_fit(config, distributed)
        _prepare_environment(distributed, bind=config.train.affinity)
        _say_without_gpu(distributed)
        from hpcrun.train.session import train

        return train(run, attempt, config, distributed, flag, position)
    except ToldByRankZero:
        return exitcodes.BAD_INPUT
    except ReadFailure as error:
        # Of the nodes that failed to read, and not of the run: elsewhere another start may help.
        failed = error if error.here else PeerFailed(f"another rank could not read: {error}")
        return _fail(run, attempt, distributed.rank, failed, position)
    except UserError as error:
        # Where the run has trained before, this node is to blame, and not what was asked for.
        unfit, worked = isinstance(error, NodeUnfit), _has_started(run, attempt)
        if distributed.rank == 0 and not (unfit and worked):
            end_helpers()  # As in _fail: a step may have come to it.
            if not isinstance(error, Occupied):
                _note_refusal(run, attempt, error)
            return _refuse(error)
        # Only this rank's trouble: another start may help on another node.
        bad = unfit and not worked
        code = _fail(run, attempt, distributed.rank, error, position, bad_input=bad)
        return exitcodes.BAD_INPUT if isinstance(error, NotTrainable) else code
    # A task that calls sys.exit(0) is not done: nothing but the end of training may say so.
    except (Exception, SystemExit) as error:
        untrained = not position.step and not _has_trained(run, attempt)
        return _fail(
            run,
            attempt,
            distributed.rank,
            error,
            position,
            bad_input=untrained and is_mistake(error),
        )


def _has_trained(run: RunDirectory, attempt: Attempt) -> bool:
    """Return whether a start before ``attempt`` came to its steps; then an error may be a node's fault."""
    if newest_commit(run) is not None:
        return True
    try:
        return any(
            event.what in ("started", "saved") and event.attempt != attempt
            for event in read_events(run)
        )
    except OSError:
        return True


def _has_started(run: RunDirectory, attempt: Attempt) -> bool:
    """Return whether the nodes of a start before ``attempt`` were fit, as far as is known."""
    if _has_trained(run, attempt):
        return True
    try:
        return attempt.restart > 0 and not tried_elsewhere(read_events(run), attempt)
    except OSError:
        return True


def _note_refusal(run: RunDirectory, attempt: Attempt, error: UserError) -> None:
    """Write the event ``bad-input`` of rank 0, with what the judging needs to know about other nodes."""
    known = error if isinstance(error, KnownToAll) else None
    note(
        run,
        "bad-input",
        attempt,
        reason=str(error),
        kind=type(error).__name__,
        host=(known and known.host) or node_name(),
        shared=known is not None and known.everywhere,
        certain=known.certain if known else isinstance(error, NotTrainable),
    )


def _record_refusal(run: RunDirectory, error: UserError) -> None:
    """Leave a failure record of a rank that ends before its attempt has begun.

    The judging counts the nodes that have such a record.
    """
    if scheduler(os.environ) == "direct" or not run.exists():
        return
    try:
        here = read_placement(os.environ)
        if here.job_id is not None:
            folder = run.attempt_logs(here.job_id, here.restart_count)
            plain = error.with_traceback(None)
            record_failure(folder, here.rank, plain, None, bad_input=True)
    except (UserError, OSError) as problem:
        print(f"hpcrun: the refusal is not recorded: {problem}", file=sys.stderr, flush=True)


def _terms(config: Config) -> ScriptTerms:
    """What a script is given of the job's times and signals."""
    job = config.job
    return ScriptTerms(
        timeout=config.train.timeout,
        # The scheduler ends the script earlier where it gives less time.
        grace=max(float(job.signal_lead), float(job.kill_wait), job.grace),
        warning=signal.Signals[f"SIG{config.warn_signal}"],
        interface=job.interface,
    )


def enter_folder(run: RunDirectory) -> None:
    """Work where the run was submitted: its task's module and its relative paths are found from there,
    whoever starts this process, and from wherever."""
    folder = (read_json(run.record) or {}).get("folder")
    if folder is None:
        return
    try:
        os.chdir(folder)
    except OSError as error:
        raise RunError(
            f"{folder}: the folder that {run.name} was submitted from cannot be entered: "
            f"{error.strerror}; put it back, or correct `folder` in {run.record}"
        ) from error
    snapshot = recorded_snapshot(run)
    copied = snapshot.copy_of(Path(folder)) if snapshot else None
    sys.path.insert(0, str(copied or folder))
    if snapshot is not None:
        # Also where PYTHONPATH or an editable install would lead to the code as it lies now.
        sys.path[:] = copied_path(sys.path, folders(), snapshot.copy_of)


def _as_submitted(run: RunDirectory, command: list[str], launcher: Launcher | None) -> list[str]:
    """The command with the code's copies in place of the files it names."""
    snapshot = recorded_snapshot(run)
    if snapshot is None:
        return command
    before = [launcher.python] if launcher else []
    words, variables = snapshot_command(snapshot, [*before, *command], Path.cwd())
    os.environ.update(variables)
    return words[len(before) :]


def _launcher(config: Config, distributed: DistributedConfig) -> Launcher | None:
    """Return what starts the command's ranks; raises UserError where they are started already."""
    job = config.job
    if job.launcher is None:
        return None
    if distributed.launch_method == "torchrun":
        raise UserError(
            f"job.launcher: {job.launcher}, but torchrun has started this rank already; submit the run with "
            "`hpcrun submit`, or with sbatch/train.sbatch"
        )
    return Launcher(job.launcher, job.gpus, launching_python(job.python, job.launcher))


def describe(config: Config) -> DistributedConfig:
    """Where this process stands, with the config's wishes about DDP; raises ClusterError."""
    found = DistributedConfig.from_env(cpu=config.job.cpu)
    train = config.train
    return found.model_copy(
        update={
            "find_unused_parameters": train.find_unused_parameters,
            "broadcast_buffers": train.broadcast_buffers,
            "gradient_as_bucket_view": train.gradient_as_bucket_view,
        }
    )


def require_fit(config: Config, distributed: DistributedConfig) -> None:
    """Check the config against the ranks that were really started; raises UserError on all of them.

    The config was checked against its own ``job`` section, but a launcher may start other numbers.
    """
    ranks, train = distributed.world_size, config.train
    line = None
    if train.parallel in ("single", "dp") and ranks > 1:
        line = (
            f"train.parallel: {train.parallel}, but {ranks} ranks were started, which would each train "
            "a model of their own; start one rank, or set train.parallel=ddp"
        )
    elif train.batch_size < ranks * (train.accumulation if train.micro_batch is None else 1):
        line = (
            f"train.batch_size: {train.batch_size} samples are too few for the {ranks} ranks that were "
            f"started x train.accumulation={train.accumulation}; start fewer ranks"
        )
    if line is not None:
        raise known_to_all(line, distributed.rank)


def _with_interface(
    config: Config, run: RunDirectory, attempt: Attempt, distributed: DistributedConfig
) -> Config:
    """Return ``config`` with the interface that ``job.interface: auto`` stands for."""
    if config.job.interface != AUTO:
        return config
    name = None
    if distributed.num_nodes > 1 and distributed.launch_method != "local":
        try:
            name = shared_interface(run, attempt, distributed, config.train.timeout)
        except NoSharedInterface as error:
            # One node with a broken network is enough, and other nodes may lack the fault.
            raise known_to_all(
                str(error), distributed.rank, everywhere=False, certain=False, host=error.host
            ) from error
        if distributed.rank == 0:
            print(
                f"hpcrun: job.interface=auto: all nodes reach each other on {name[1:]}", flush=True
            )
    return config.model_copy(update={"job": config.job.model_copy(update={"interface": name})})


def _require_node(config: Config, distributed: DistributedConfig) -> None:
    """Check that this node has the GPUs and the network that the job needs, and name the network.

    Raises:
        NodeUnfit: it has not.
    """
    if not config.job.cpu:
        require_given_gpus(os.environ)
    if config.job.interface and distributed.num_nodes > 1 and distributed.launch_method != "local":
        own = own_interfaces()
        os.environ.update(interface_variables(config.job.interface, os.environ, own))


def _slurm_hosts(distributed: DistributedConfig) -> str | None:
    """The job's nodes, where they are Slurm's and may be blamed for what happens."""
    return os.environ.get("SLURM_JOB_NODELIST") if distributed.launch_method == "slurm" else None


def _prepare_environment(distributed: DistributedConfig, *, bind: bool, started: int = 1) -> None:
    """Set what libraries read once, at import, and before their threads start.

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
        # gloo would otherwise bind to whatever address the host's name resolves to.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")


def _say_without_gpu(distributed: DistributedConfig) -> None:
    if distributed.rank == 0 and not distributed.device_ids:
        seen = visible_gpus(os.environ)
        why = "no GPU is visible" if not seen else "job.cpu asks for it"
        ranks = distributed.world_size
        shared = "1 rank on the CPU" if ranks == 1 else f"{ranks} ranks on the CPU over gloo"
        print(
            f"hpcrun: {shared} ({why}), threads each: {os.environ['OMP_NUM_THREADS']}",
            flush=True,
        )


def _refuse(error: UserError) -> int:
    say_aside(f"hpcrun: {error}")
    return exitcodes.BAD_INPUT


def _fail(
    run: RunDirectory,
    attempt: Attempt,
    rank: int,
    error: BaseException,
    position: Position,
    *,
    bad_input: bool = False,
) -> int:
    folder = run.attempt_logs(attempt.job, attempt.restart)
    end_helpers()  # Before the traceback goes, and with it the loader, which would wait for them.
    if isinstance(error, SaysAll):
        error.__traceback__ = None
    try:
        failure = record_failure(folder, rank, error, position.step, bad_input=bad_input)
    except OSError as disk:
        print(f"hpcrun: the failure is not recorded: {disk}", file=sys.stderr, flush=True)
        raise error from None
    if isinstance(error, UserError):
        print(f"hpcrun: rank {rank}: {error}", file=sys.stderr, flush=True)
    elif is_cascade(failure):
        first_line = (failure.message.splitlines() or [""])[0]
        print(f"hpcrun: rank {rank} lost its peers: {first_line}", file=sys.stderr, flush=True)
    else:
        text = failure.traceback or f"{failure.kind}: {failure.message}"
        say_aside(*text.rstrip("\n").split("\n"))
    return exitcodes.BAD_INPUT if bad_input else exitcodes.FAILED
