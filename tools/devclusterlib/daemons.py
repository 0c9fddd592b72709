"""Starting and stopping the daemons, and knowing when each one answers.

All run in the foreground as our own children: the pid is known without a pid file, and a daemon
that dies while we wait for it is noticed at once, with its own last words.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from .commands import clean_environment
from .errors import Refusal
from .hosts import enter_argv, holder_of, remember
from .layout import Layout
from .processes import ProcessId, end_gently
from .spec import ClusterSpec

POLL_S = 0.02


def slurmd_name(node: str) -> str:
    """Name of a node's daemon."""
    return f"slurmd-{node}"


def host_of(daemon: str) -> str:
    """Host on which ``daemon`` runs."""
    return daemon.removeprefix("slurmd-") if daemon.startswith("slurmd-") else "ctl"


def slurm_daemons(spec: ClusterSpec) -> list[str]:
    """Daemons of Slurm itself in the order in which they start."""
    accounting = ["mariadbd", "slurmdbd"] if spec.accounting else []
    return ["munged", *accounting, "slurmctld", *(slurmd_name(node) for node in spec.node_names)]


def munged_argv(layout: Layout) -> list[str]:
    """A munged of the cluster's own; --force because /tmp is writable to others."""
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
    """The accounting database, on the loopback of the controller's host."""
    return [
        "mariadbd",
        "--no-defaults",
        "--user=root",
        f"--datadir={layout.root}/db",
        f"--socket={layout.run}/mariadb.socket",
        f"--pid-file={layout.run}/mariadbd.pid",
        "--bind-address=127.0.0.1",
        f"--init-file={layout.etc}/database.sql",
        # A job's row may not be lost to the crash of a test, but a test may not wait for a disk.
        "--innodb-flush-log-at-trx-commit=2",
        "--innodb-buffer-pool-size=32M",
        "--skip-log-bin",
    ]


def daemon_argv(layout: Layout, daemon: str) -> list[str]:
    """Command line of ``daemon`` in the foreground."""
    if daemon == "munged":
        return munged_argv(layout)
    if daemon == "mariadbd":
        return mariadbd_argv(layout)
    if daemon == "slurmdbd":
        return ["slurmdbd", "-D"]
    if daemon == "slurmctld":
        return ["slurmctld", "-D", "-f", str(layout.slurm_conf)]
    return ["slurmd", "-D", "-N", host_of(daemon), "-f", str(layout.slurm_conf)]


def recorded(layout: Layout, daemon: str) -> ProcessId | None:
    """The running process of ``daemon``, None when it does not run."""
    process = ProcessId.load(layout.process_record(daemon))
    return process if process is not None and process.alive() else None


def start(layout: Layout, daemon: str) -> None:
    """Start ``daemon`` on its host, unless it runs."""
    if recorded(layout, daemon) is None:
        start_on(layout, host_of(daemon), daemon, daemon_argv(layout, daemon))


def start_on(layout: Layout, host: str, name: str, argv: list[str]) -> None:
    """Start any long-lived program on a host, its words in the log directory, its pid recorded."""
    with output_path(layout, name).open("ab") as output:
        process = subprocess.Popen(
            enter_argv(holder_of(layout, host), argv),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=clean_environment() | {"SLURM_CONF": str(layout.slurm_conf)},
            cwd="/",
            start_new_session=True,
        )
    remember(layout, name, process.pid)


def output_path(layout: Layout, name: str) -> Path:
    """Where standard output and error of a daemon go; Slurm's own log lies beside it."""
    return layout.log / f"{name}.out"


def stop(layout: Layout, daemon: str) -> None:
    """End ``daemon`` as a service manager would; nothing happens when it does not run."""
    process = recorded(layout, daemon)
    if process is not None:
        end_gently(process)


def wait_for(
    layout: Layout,
    what: str,
    check: Callable[[], bool],
    *,
    needs: list[str],
    patience_s: float = 30.0,
) -> None:
    """Return as soon as ``check`` holds.

    Raises `Refusal` with the last words of a daemon in ``needs`` that ended, or when
    ``patience_s`` have passed.
    """
    deadline = time.monotonic() + patience_s
    while not check():
        for daemon in needs:
            if recorded(layout, daemon) is None:
                raise Refusal(
                    f"{daemon} ended while we waited for {what}: {last_words(layout, daemon)}",
                    f"its log is {layout.daemon_log(daemon)}",
                )
        if time.monotonic() > deadline:
            raise Refusal(
                f"no {what} within {patience_s:.0f} s: {last_words(layout, needs[-1])}",
                f"the logs are in {layout.log}",
            )
        time.sleep(POLL_S)


def last_words(layout: Layout, daemon: str) -> str:
    """The last lines that ``daemon`` wrote, as one line."""
    try:
        lines = output_path(layout, daemon).read_text(errors="replace").splitlines()
    except OSError:
        return "it said nothing"
    return " | ".join(line.strip() for line in lines[-3:]) or "it said nothing"
