"""The rendezvous of a script's ranks: an address that reaches rank 0, and a free port there."""

import os
import sys
from collections.abc import Callable

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.errors import ClusterError
from hpcrun.cluster.launchers import LOOPBACK, step_hosts
from hpcrun.cluster.network.addresses import bound_address
from hpcrun.cluster.network.interfaces import gloo_interface, meeting_addresses
from hpcrun.cluster.network.ports import is_free, listen, port_candidates, wanted_ports
from hpcrun.lifecycle.rank.address_listener import answer, leads_to
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt
from hpcrun.run.rendezvous import Meeting, MeetingBoard, MeetingStopped, ScriptEnded


class RankZeroFailed(RunError):
    """The script of rank 0 failed before this rank reached it."""


def meeting_place(
    run: RunDirectory,
    attempt: Attempt,
    config: DistributedConfig,
    board: MeetingBoard,
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
        MeetingStopped: this rank was asked to stop, or the script of rank 0 has stopped.
    """
    if config.launch_method == "single":
        # A launcher or the script listens there, and several jobs may share this machine.
        return config.model_copy(update={"master_port": _free_port(f"{run.path} {attempt.owner}")})
    if config.launch_method not in ("slurm", "local"):
        return config
    if config.rank == 0:
        address, port = _invite(run, attempt, board, interface)
        peers = step_hosts(os.environ)
    else:
        address, port = _join(board, timeout, stop)
        peers = [address, *step_hosts(os.environ)]
    if config.launch_method == "slurm":
        os.environ.update(gloo_interface(os.environ, peers))
    return config.model_copy(update={"master_addr": address, "master_port": port})


def _invite(
    run: RunDirectory,
    attempt: Attempt,
    board: MeetingBoard,
    interface: str | None,
) -> tuple[str, int]:
    """Publish the address where the script of rank 0 will listen; return its address here and the port."""
    addresses = meeting_addresses(os.environ, interface)
    # Jobs of the local cluster that start in the same second have the same id, so the key contains the run.
    key = f"{run.path} {attempt.owner}"
    listener = listen(port_candidates(f"{key} greeting"))
    port = _free_port(key)
    meeting = Meeting(tuple(addresses), listener.getsockname()[1], script_port=port)
    answer(listener, meeting.key)
    board.publish(meeting)
    return next((name for name in addresses if bound_address(name)), LOOPBACK), port


def _free_port(key: str) -> int:
    """Return a port that is free here. The script binds it seconds later, so other jobs try other ports."""
    port = next((port for port in wanted_ports(os.environ, key) if is_free("", port)), None)
    if port is None:
        raise ClusterError("no free port for rank 0; `ss -ltn` shows the processes that hold them")
    return port


def _join(board: MeetingBoard, timeout: float, stop: Callable[[], bool]) -> tuple[str, int]:
    """Return the address of rank 0 and the port of its script."""
    try:
        return board.meet(_connect, timeout, stop)
    except ScriptEnded as ended:
        meeting = ended.meeting
    if meeting.end == "failed":
        raise RankZeroFailed(
            "rank 0's script failed before this rank reached it; the script does not start here; the log of "
            "rank 0 has the cause"
        )
    if meeting.end == "stopped":
        print("hpcrun: rank 0's script has stopped already", file=sys.stderr, flush=True)
        raise MeetingStopped
    # Ranks that need each other cannot end well without the others, so this rank has independent work.
    line = "rank 0's script has already ended with exit code 0; the script starts without rank 0"
    print(f"hpcrun: {line}", file=sys.stderr, flush=True)
    return meeting.addresses[0], meeting.script_port


def _connect(address: str, meeting: Meeting, patience: float) -> tuple[str, int] | None:
    return (address, meeting.script_port) if leads_to(address, meeting, patience) else None
