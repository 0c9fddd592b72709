"""Start a script as one rank, wait for its end, and record the meaning of that end.

The script gets the variables that torchrun would set, and every stop signal once. The script itself
saves on a signal. hpcrun records that the script was stopped and must be started again.

The ranks of a script connect to MASTER_ADDR:MASTER_PORT, where the script of rank 0 starts to listen seconds
later. Until then rank 0 answers on another port, with a key that no other host knows.
"""

import contextlib
import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from hpcrun import exit_codes
from hpcrun.descendants import adopt_orphans, die_with_parent
from hpcrun.diagnose.script_log import script_error
from hpcrun.errors import ClusterError, UserError
from hpcrun.job.script.command import Launcher
from hpcrun.job.script.copies import CopyWatch
from hpcrun.job.script.end import ProgressWatch, ScriptEnd, note_stop, record_end
from hpcrun.job.script.watch import ScriptWatch
from hpcrun.ranks.addresses import bound_address, is_free, listen, port_candidates, wanted_ports
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.interfaces import gloo_interface, rendezvous_addresses
from hpcrun.ranks.py_spy import script_stacks
from hpcrun.ranks.signals import StopFlag
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.endings import record_unfinished
from hpcrun.run.journal.events import CopiesFound
from hpcrun.run.journal.journal import Journal
from hpcrun.run.rendezvous import End, Rendezvous, RendezvousFile, RendezvousStopped, ScriptEnded
from hpcrun.run.stacks import Answering, Mailbox
from hpcrun.slurm.local.job_files import script_environment
from hpcrun.slurm.placement import LOOPBACK, step_hosts

_ENDS: Mapping[int, End] = {exit_codes.DONE: "done", exit_codes.UNFINISHED: "stopped"}


@dataclass(frozen=True)
class ScriptTerms:
    """The timeouts and the signal for a script.

    ``timeout``: seconds to wait for rank 0's port. ``grace``: seconds that the processes of a script have
    to end after a stop signal. ``warning``: the signal of `job.warn_signal`.
    ``interface``: the network interfaces to use, as ``job.interface`` has them. ``zero_finishes``: exit
    code 0 after a stop signal means that the script has finished. ``silent_after``: seconds without output
    after which the attempt counts as a hang; None: never.
    """

    timeout: float
    grace: float = 30.0
    warning: signal.Signals = signal.SIGUSR2
    interface: str | None = None
    zero_finishes: bool = False
    silent_after: float | None = None


def run_script(
    command: Sequence[str],
    run: RunDirectory,
    attempt: Attempt,
    config: DistributedConfig,
    flag: StopFlag,
    terms: ScriptTerms,
    launcher: Launcher | None = None,
) -> int:
    """Run ``command`` as this rank's program and return the rank's exit code.

    The exit code is the program's own (128 + n for signal n; 1 instead of 2 and 74, which have a meaning in
    hpcrun). It is 0 after a stop signal, and if the script ends with 75 to be continued: srun ends
    all ranks at the first other code, even ranks that still save. The event ``stopped``, written by
    rank 0, and the mark of :func:`record_unfinished` record that the script has not finished.

    Args:
            launcher: starts the ranks of ``command``; None if this process is the rank.

    Raises:
        UserError: the program cannot be started.
        RunError: rank 0 published no port in time, cannot be reached, or its script has failed.
    """
    # The rendezvous may set variables for gloo, so it comes before the environment is read.
    folder = run.attempt_logs(attempt)
    step = os.environ.get("SLURM_STEP_ID", "")
    rendezvous_file = RendezvousFile(run, attempt, ranks=config.world_size, step=step)
    try:
        met = meet_rank_zero(
            run,
            attempt,
            config,
            rendezvous_file,
            terms.timeout,
            terms.interface,
            lambda: bool(flag.reason),
        )
    except RendezvousStopped:
        return _unstarted(run, attempt, config, rendezvous_file, flag)
    if flag.reason:
        # The script would never receive the signal, and the ranks that still waited for rank 0 have ended.
        return _unstarted(run, attempt, config, rendezvous_file, flag)
    with ProgressWatch(run, attempt, config.rank) as progress:
        environ = {
            "PYTHONUNBUFFERED": "1",
            **os.environ,
            **script_environment(os.environ),
            **launcher_variables(met, attempt),
            **progress.variables,
            "HPCRUN_RUN": str(run.path),
            "HPCRUN_RESTART": str(Journal(run).read().starts_before(attempt)),
        }
        # Adopt before the script starts: a wrapper may die of a signal at any time.
        adopt_orphans()
        child = _start(command, environ, launcher)
        if config.rank == 0:
            progress.note_start()
        copies = None
        if config.rank == 0 and met.launch_method in ("slurm", "local"):
            copies = CopyWatch(
                command,
                Path.cwd(),
                folder,
                met.master_port,
                met.world_size * (launcher.ranks if launcher else 1),
                environ=environ,
                note=lambda line: Journal(run).note(CopiesFound(attempt=attempt, reason=line)),
                launched=launcher is not None,
            )
        watch = ScriptWatch(
            child,
            run,
            attempt,
            flag,
            config,
            terms.warning,
            progress,
            silent_after=terms.silent_after,
            copies=copies,
        )
        mail = Mailbox(folder, config.world_size)
        with Answering(
            mail, config.rank, lambda: (progress.step, None), lambda: script_stacks(child.pid)
        ):
            code = watch.wait(terms.grace)
        _close(rendezvous_file, "stopped" if flag.reason else _ENDS.get(code, "failed"))
        progress.look(last=True)
        if flag.reason:
            how = f"{flag.reason.name.lower()}, its exit code {code}"
            print(
                f"hpcrun: the script ended after a signal to stop ({how})",
                file=sys.stderr,
                flush=True,
            )
            done = code == 0 and terms.zero_finishes
            saved = progress.saved_since_stop
            if config.rank == 0:
                done = done or progress.done
            note_stop(run, attempt, flag.reason, code, saved, done=done, rank=config.rank)
            return exit_codes.DONE
    if code == exit_codes.UNFINISHED:
        try:
            record_unfinished(folder)
        except OSError as error:
            print(f"hpcrun: the request to be continued is not recorded: {error}", file=sys.stderr)
            return exit_codes.FAILED
        return exit_codes.DONE
    if code:
        last = script_error(folder / f"rank-{config.rank:05d}.log", code)
        record_end(folder, config.rank, ScriptEnd(command, code, last), progress.step)
    return rank_code(code if code >= 0 else 128 - code)


def _unstarted(
    run: RunDirectory,
    attempt: Attempt,
    config: DistributedConfig,
    rendezvous_file: RendezvousFile,
    flag: StopFlag,
) -> int:
    """Exit before the script has started; return the exit code of an orderly stop."""
    _close(rendezvous_file, "stopped")
    if flag.reason:
        why = flag.reason.name.lower()
        line = f"asked to stop before the script started here ({why})"
        print(f"hpcrun: {line}", file=sys.stderr, flush=True)
        note_stop(run, attempt, flag.reason, None, None, rank=config.rank)
    return exit_codes.DONE


def _close(rendezvous_file: RendezvousFile, end: End) -> None:
    """Publish that rank 0 has ended, so that late ranks do not wait for it."""
    try:
        rendezvous_file.publish_end(end)
    except OSError as error:
        print(f"hpcrun: the end of the script is not published: {error}", file=sys.stderr)


def _start(
    command: Sequence[str], environ: dict[str, str], launcher: Launcher | None
) -> "subprocess.Popen[bytes]":
    words = launcher.words(command, environ) if launcher else [_program(command[0]), *command[1:]]
    try:
        return subprocess.Popen(
            words,
            env=environ,
            # MPI communicates with srun through a descriptor that srun has opened (PMI_FD).
            close_fds=False,
            # No launcher finds a script after its rank died.
            preexec_fn=die_with_parent,
        )
    except OSError as error:
        why = error.strerror
        # The system reports a closed folder of PATH, also if no folder has the program.
        if isinstance(error, PermissionError) and not shutil.which(
            words[0], os.F_OK, environ.get("PATH")
        ):
            why = os.strerror(errno.ENOENT)
        raise UserError(
            f"{command[0]}: cannot be started: {why}; check the path after `--`"
        ) from error


def rank_code(code: int) -> int:
    """Return a rank's exit code for a program that ended with ``code`` and does not know hpcrun's codes."""
    ours = (exit_codes.BAD_INPUT, exit_codes.SAVE_FAILED)
    return exit_codes.FAILED if code in ours else code


def launcher_variables(config: DistributedConfig, attempt: Attempt) -> dict[str, str]:
    """Return the variables that torchrun sets for its ranks (torch.distributed.run, "Environment Variables").

    All of them, not only those that ``env://`` reads: Lightning and Accelerate take the run id as the sign
    that a launcher has started the ranks.
    """
    variables = config.to_env_dict()
    if config.launch_method == "torchrun":
        return variables
    return variables | {
        "GROUP_WORLD_SIZE": str(config.num_nodes),
        "ROLE_NAME": "default",
        "ROLE_RANK": str(config.rank),
        "ROLE_WORLD_SIZE": str(config.world_size),
        "TORCHELASTIC_RUN_ID": attempt.job,
        # A requeue is not a restart by torchrun.
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        # Rank 0 holds the store; there is no agent.
        "TORCHELASTIC_USE_AGENT_STORE": "False",
    }


def _program(name: str) -> str:
    """Return ``name``, or the path of this interpreter if PATH has no `python` (Debian, a job's shell)."""
    unnamed = name in ("python", "python3") and shutil.which(name) is None
    return sys.executable if unnamed else name


class RankZeroFailed(RunError):
    """The script of rank 0 failed before this rank reached it."""


def meet_rank_zero(
    run: RunDirectory,
    attempt: Attempt,
    config: DistributedConfig,
    rendezvous_file: RendezvousFile,
    timeout: float,
    interface: str | None,
    stop: Callable[[], bool],
) -> DistributedConfig:
    """Return ``config`` with an address that reaches rank 0 from here, and a port that is free there.

    If gloo would not use the network of that address, this function sets GLOO_SOCKET_IFNAME in this process.

    Args:
        timeout: seconds for the rendezvous.
        interface: ``job.interface``.
        stop: returns whether this rank was asked to stop.

    Raises:
        ClusterError: rank 0 finds no free port.
        RunError: rank 0 published nothing in time, or none of its addresses can be reached.
        RankZeroFailed: the script of rank 0 ended with a failure.
        RendezvousStopped: this rank was asked to stop, or the script of rank 0 has stopped.
    """
    if config.launch_method == "single":
        # A launcher or the script listens there, and several jobs may share this machine.
        return config.model_copy(update={"master_port": _free_port(f"{run.path} {attempt.owner}")})
    if config.launch_method not in ("slurm", "local"):
        return config
    if config.rank == 0:
        address, port = _publish_address(run, attempt, rendezvous_file, interface)
        peers = step_hosts(os.environ)
    else:
        address, port = _join(rendezvous_file, timeout, stop)
        peers = [address, *step_hosts(os.environ)]
    if config.launch_method == "slurm":
        os.environ.update(gloo_interface(os.environ, peers))
    return config.model_copy(update={"master_addr": address, "master_port": port})


def _publish_address(
    run: RunDirectory,
    attempt: Attempt,
    rendezvous_file: RendezvousFile,
    interface: str | None,
) -> tuple[str, int]:
    """Publish the address where the script of rank 0 will listen; return its address here and the port."""
    addresses = rendezvous_addresses(os.environ, interface)
    # Jobs of the local cluster that start in the same second have the same id, so the key contains the run.
    key = f"{run.path} {attempt.owner}"
    listener = listen(port_candidates(f"{key} greeting"))
    port = _free_port(key)
    rendezvous = Rendezvous(tuple(addresses), listener.getsockname()[1], script_port=port)
    answer(listener, rendezvous.key)
    rendezvous_file.publish(rendezvous)
    return next((name for name in addresses if bound_address(name)), LOOPBACK), port


def _free_port(key: str) -> int:
    """Return a port that is free here. The script binds it seconds later, so other jobs try other ports."""
    port = next((port for port in wanted_ports(os.environ, key) if is_free("", port)), None)
    if port is None:
        raise ClusterError("no free port for rank 0; `ss -ltn` shows the processes that use them")
    return port


def _join(
    rendezvous_file: RendezvousFile, timeout: float, stop: Callable[[], bool]
) -> tuple[str, int]:
    try:
        return rendezvous_file.meet(_connect, timeout, stop)
    except ScriptEnded as ended:
        rendezvous = ended.rendezvous
    if rendezvous.end == "failed":
        raise RankZeroFailed(
            "rank 0's script failed before this rank reached it; the script does not start here; the log of "
            "rank 0 has the cause"
        )
    if rendezvous.end == "stopped":
        print("hpcrun: rank 0's script has stopped already", file=sys.stderr, flush=True)
        raise RendezvousStopped
    # Ranks that need each other cannot end well without the others, so this rank has independent work.
    line = "rank 0's script has already ended with exit code 0; the script starts without rank 0"
    print(f"hpcrun: {line}", file=sys.stderr, flush=True)
    return rendezvous.addresses[0], rendezvous.script_port


def _connect(address: str, rendezvous: Rendezvous, patience: float) -> tuple[str, int] | None:
    return (address, rendezvous.script_port) if leads_to(address, rendezvous, patience) else None


_ANSWER = 5.0
_PAUSE = 0.1


def answer(listener: socket.socket, key: str) -> None:
    """Send ``key`` to every client of ``listener`` from a thread, until it is closed or the process ends."""
    threading.Thread(
        target=_answer_all, args=(listener, key.encode()), name="hpcrun-greeting", daemon=True
    ).start()


def leads_to(
    address: str, rendezvous: Rendezvous, patience: float, *, least: float = _ANSWER
) -> bool:
    """Return True if the host of ``address`` answers on the rendezvous port with its key.

    Args:
        patience: seconds to connect.
        least: minimum seconds to wait for the answer of a host that has connected.
    """
    try:
        with socket.create_connection((address, rendezvous.port), timeout=patience) as connection:
            connection.settimeout(max(patience, least))
            heard = b""
            while len(heard) < len(rendezvous.key) and (more := connection.recv(256)):
                heard += more
    except (OSError, UnicodeError):
        return False
    return heard == rendezvous.key.encode()


def _answer_all(listener: socket.socket, key: bytes) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            if listener.fileno() < 0:
                return
            # The client has disconnected already, or no descriptor is free at the moment.
            time.sleep(_PAUSE)
            continue
        with connection, contextlib.suppress(OSError):
            connection.settimeout(_ANSWER)
            connection.sendall(key)
