"""The rendezvous of a script's ranks: an address that reaches rank 0, and a free port there."""

import os
import sys
from collections.abc import Callable

from hpcrun.errors import ClusterError
from hpcrun.ranks.address_listener import answer, leads_to
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.launchers import LOOPBACK, step_hosts
from hpcrun.ranks.network.addresses import bound_address
from hpcrun.ranks.network.interfaces import gloo_interface, rendezvous_addresses
from hpcrun.ranks.network.ports import is_free, listen, port_candidates, wanted_ports
from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt
from hpcrun.run.rendezvous import Rendezvous, RendezvousFile, RendezvousStopped, ScriptEnded


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
        address, port = _invite(run, attempt, rendezvous_file, interface)
        peers = step_hosts(os.environ)
    else:
        address, port = _join(rendezvous_file, timeout, stop)
        peers = [address, *step_hosts(os.environ)]
    if config.launch_method == "slurm":
        os.environ.update(gloo_interface(os.environ, peers))
    return config.model_copy(update={"master_addr": address, "master_port": port})


def _invite(
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
    """Return the address of rank 0 and the port of its script."""
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
