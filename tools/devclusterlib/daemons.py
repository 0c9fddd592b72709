"""Start and stop the daemons, and check that each one answers.

All daemons run in the foreground as child processes. So the pid is known without a pid file, and the
death of a daemon during a wait is noticed immediately, with its last output.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from . import installations, sharedfs
from .commands import clean_environment
from .errors import Refusal
from .hosts import enter_argv, holder_of, remember
from .layout import Layout
from .processes import ProcessId, end_gently
from .spec import ClusterSpec

POLL_S = 0.02


def slurmd_name(node: str) -> str:
    """Return the name of a node's daemon."""
    return f"slurmd-{node}"


def host_of(daemon: str) -> str:
    """Return the host of ``daemon``: the name after the dash, or the controller's host."""
    return daemon.partition("-")[2] or "ctl"


def names(spec: ClusterSpec) -> list[str]:
    """Return all daemons of a cluster in the order of their start."""
    shared = list(sharedfs.KINDS[spec.shared_fs].ports)
    mounts = [sharedfs.client_name(host) for host in spec.host_names] if shared else []
    accounting = ["mariadbd", "slurmdbd"] if spec.accounting else []
    nodes = [slurmd_name(node) for node in spec.node_names]
    return [*shared, *mounts, "munged", *accounting, "slurmctld", *nodes]


def munged_argv(layout: Layout) -> list[str]:
    """Return the command of the cluster's munged; with --force, because others may write to /tmp."""
    return [
        "munged",
        "--foreground",
        "--force",
        f"--key-file={layout.munge_key}",
        f"--socket={layout.munge_socket}",
        f"--pid-file={layout.run}/munged.pid",
        f"--log-file={layout.daemon_log('munged')}",
        f"--seed-file={layout.run}/munge.seed",
    ]


def mariadbd_argv(layout: Layout) -> list[str]:
    """Return the command of the accounting database, on the loopback of the controller's host."""
    return [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={layout.root}/db",
        f"--socket={layout.run}/mariadb.socket",
        f"--pid-file={layout.run}/mariadbd.pid",
        "--bind-address=127.0.0.1",
        f"--init-file={layout.etc}/database.sql",
        # A crashed test must not lose a job's row, but a test must not wait for a disk.
        "--innodb-flush-log-at-trx-commit=2",
        "--innodb-buffer-pool-size=32M",
        "--skip-log-bin",
    ]


def slurmd_argv(layout: Layout, slurm: str, node: str) -> list[str]:
    """Return the command of a node's slurmd; a version other than the system's starts its own step daemon."""
    own = ["-d", str(installations.stepd(slurm))] if slurm else []
    return ["slurmd", "-D", "-N", node, "-f", str(layout.slurm_conf), *own]


def daemon_argv(layout: Layout, spec: ClusterSpec, daemon: str) -> list[str]:
    """Return the command line of ``daemon`` in the foreground."""
    if daemon in sharedfs.KINDS[spec.shared_fs].ports:
        return sharedfs.server_argv(layout)
    if daemon.startswith("mount-"):
        return sharedfs.client_argv(layout, host_of(daemon))
    if daemon == "munged":
        return munged_argv(layout)
    if daemon == "mariadbd":
        return mariadbd_argv(layout)
    if daemon == "slurmdbd":
        return ["slurmdbd", "-D"]
    if daemon == "slurmctld":
        return ["slurmctld", "-D", "-f", str(layout.slurm_conf)]
    return slurmd_argv(layout, spec.slurm, host_of(daemon))


def recorded(layout: Layout, daemon: str) -> ProcessId | None:
    """Return the running process of ``daemon``, None if it does not run."""
    process = ProcessId.load(layout.process_record(daemon))
    return process if process is not None and process.alive() else None


def start(layout: Layout, spec: ClusterSpec, daemon: str) -> None:
    """Start ``daemon`` on its host, unless it runs; its output goes to the log directory."""
    if recorded(layout, daemon) is not None:
        return
    argv = daemon_argv(layout, spec, daemon)
    own = {"PATH": installations.search_path(spec.slurm), "SLURM_CONF": str(layout.slurm_conf)}
    with output_path(layout, daemon).open("ab") as output:
        process = subprocess.Popen(
            enter_argv(holder_of(layout, host_of(daemon)), argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=clean_environment() | own,
            cwd="/",
            start_new_session=True,
        )
    remember(layout, daemon, process.pid)


def output_path(layout: Layout, name: str) -> Path:
    """Return the file for a daemon's standard output and error, next to Slurm's own log."""
    return layout.log / f"{name}.out"


def stop(layout: Layout, daemon: str) -> None:
    """End ``daemon`` as a service manager would; does nothing if it does not run."""
    process = recorded(layout, daemon)
    if process is not None:
        end_gently(process)


def wait_for(
    layout: Layout, check: Callable[[], bool], daemon: str, patience_s: float = 30.0
) -> None:
    """Return as soon as ``check`` is true.

    Raises `Refusal` with the last output of ``daemon`` if the daemon has ended, or after
    ``patience_s`` seconds.
    """
    deadline = time.monotonic() + patience_s
    while not check():
        if recorded(layout, daemon) is None:
            raise Refusal(
                f"{daemon} ended immediately: {last_words(layout, daemon)}",
                f"its log is {output_path(layout, daemon)}",
            )
        if time.monotonic() > deadline:
            raise Refusal(
                f"{daemon} does not answer within {patience_s:.0f} s: {last_words(layout, daemon)}",
                f"its log is {output_path(layout, daemon)}",
            )
        time.sleep(POLL_S)


def last_words(layout: Layout, daemon: str) -> str:
    """Return the last lines that ``daemon`` wrote, as one line."""
    try:
        lines = output_path(layout, daemon).read_text(errors="replace").splitlines()
    except OSError:
        return "it said nothing"
    return " | ".join(line.strip() for line in lines[-3:]) or "it said nothing"
