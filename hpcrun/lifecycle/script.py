"""Any script at all: run a program that never heard of us as one rank.

It gets the variables that its own launcher would have set, the stop signals are passed on to it, and
its exit code is ours. Whether it saves on a signal is its own affair.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Sequence

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.cluster.errors import ClusterError
from hpcrun.cluster.ports import is_free, port_candidates
from hpcrun.errors import UserError
from hpcrun.lifecycle import exitcodes
from hpcrun.lifecycle.signals import StopFlag, StopReason
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.run.rendezvous import publish_master, wait_for_master

_SIGNAL_OF = {StopReason.TERMINATE: signal.SIGTERM, StopReason.WARNING: signal.SIGUSR2}


def run_script(
    command: Sequence[str],
    run: RunDirectory,
    attempt: Attempt,
    config: DistributedConfig,
    flag: StopFlag,
    *,
    timeout: float,
) -> int:
    """Run ``command`` as this rank's program and return its exit code (128 + n for signal n).

    Args:
        timeout: seconds to wait for rank 0's port.

    Raises:
        UserError: the program cannot be started.
        RunError: rank 0 published no port in time.
    """
    environ = os.environ | _meeting_place(run, attempt, config, timeout).to_env_dict()
    environ |= {"HPCRUN_RUN": str(run.path), "HPCRUN_RESTART": str(attempt.restart)}
    try:
        child = subprocess.Popen(list(command), env=environ)
    except OSError as error:
        raise UserError(
            f"{command[0]}: cannot be started: {error.strerror}; check the path after `--`"
        ) from error
    code = _wait(child, flag)
    if flag.reason and code in (0, -signal.SIGTERM, -signal.SIGUSR2):
        # A script that ends on a signal was stopped, whatever it returns: only ours means done.
        return exitcodes.UNFINISHED
    return code if code >= 0 else 128 - code


def _wait(child: "subprocess.Popen[bytes]", flag: StopFlag) -> int:
    passed_on = StopReason.NONE
    while True:
        if flag.reason > passed_on:
            passed_on = flag.reason
            child.send_signal(_SIGNAL_OF[passed_on])
            print(f"hpcrun: passed {_SIGNAL_OF[passed_on].name} on", file=sys.stderr, flush=True)
        try:
            return child.wait(timeout=0.2)
        except subprocess.TimeoutExpired:
            continue


def _meeting_place(
    run: RunDirectory, attempt: Attempt, config: DistributedConfig, timeout: float
) -> DistributedConfig:
    if config.launch_method not in ("slurm", "local"):
        return config
    if config.rank == 0:
        address, port = config.master_addr, _free_port(attempt)
        publish_master(run, attempt, address, port)
    else:
        address, port = wait_for_master(run, attempt, timeout)
    return config.model_copy(update={"master_addr": address, "master_port": port})


def _free_port(attempt: Attempt) -> int:
    for port in port_candidates(attempt.owner):
        if is_free("", port):
            return port
    raise ClusterError("no free port for rank 0; look with `ss -ltn` at who holds them")
