"""The place where the ranks of a script meet: an address that leads to rank 0, and a port free there."""

import os

from hpcrun.cluster.addresses import bound_address
from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.errors import ClusterError
from hpcrun.cluster.interfaces import gloo_interface, meeting_addresses
from hpcrun.cluster.launchers import LOOPBACK, step_hosts
from hpcrun.cluster.ports import is_free, listen, port_candidates, wanted_ports
from hpcrun.lifecycle.greeting import answer, leads_to
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.run.rendezvous import Meeting, MeetingBoard


def meeting_place(
    run: RunDirectory,
    attempt: Attempt,
    config: DistributedConfig,
    board: MeetingBoard,
    timeout: float,
    interface: str | None,
) -> DistributedConfig:
    """Return ``config`` with an address that leads from here to rank 0, and a port that is free there.

    Where gloo would not use the network that leads there, GLOO_SOCKET_IFNAME is set in this process.

    Args:
        timeout: seconds to meet.
        interface: ``job.interface``.

    Raises:
        ClusterError: rank 0 finds no free port.
        RunError: rank 0 published nothing in time, or none of its addresses leads to it.
    """
    if config.launch_method not in ("slurm", "local"):
        return config
    if config.rank == 0:
        address, port = _invite(run, attempt, board, interface)
        peers = step_hosts(os.environ)
    else:
        address, port = board.meet(_connect, timeout)
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
    """Publish where the script of rank 0 will listen; return its address here and the port."""
    addresses = meeting_addresses(os.environ, interface)
    # Jobs of the local cluster that start in the same second have the same id, hence the run in the key.
    key = f"{run.path} {attempt.owner}"
    listener = listen(port_candidates(f"{key} greeting"))
    # The script binds the port seconds later: other jobs had better try other ports.
    port = next((port for port in wanted_ports(os.environ, key) if is_free("", port)), None)
    if port is None:
        raise ClusterError("no free port for rank 0; look with `ss -ltn` at what holds them")
    meeting = Meeting(tuple(addresses), listener.getsockname()[1], script_port=port)
    answer(listener, meeting.key)
    board.publish(meeting)
    return next((name for name in addresses if bound_address(name)), LOOPBACK), port


def _connect(address: str, meeting: Meeting, patience: float) -> tuple[str, int] | None:
    return (address, meeting.script_port) if leads_to(address, meeting, patience) else None
