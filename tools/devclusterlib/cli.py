"""The command line: parse, call one function, print. A refusal is one line and exit code 2 or 3."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from . import (
    apptainerinstall,
    cluster,
    faults,
    lifecycle,
    options,
    report,
    requirements,
    slurminstall,
    spec,
    wrappers,
)
from .errors import Refusal
from .processes import ProcessId, read_process


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    parsed = options.parse(sys.argv[1:] if arguments is None else arguments)
    try:
        return COMMANDS[parsed.command](parsed)
    except Refusal as refusal:
        print(f"devcluster: {refusal}", file=sys.stderr)
        return refusal.exit_code
    except BrokenPipeError:
        # The reader (`| head`) has ended; Python would report the closed pipe again at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print("devcluster: interrupted", file=sys.stderr)
        return 130


def do_up(parsed: argparse.Namespace) -> int:
    """Bring a cluster up and print the next commands for the user."""
    wanted = options.spec_from(parsed)
    requirements.require(wanted)
    begun = time.monotonic()
    made, started = lifecycle.up(wanted, root=parsed.root, owner=owner_from(parsed.owner_pid))
    print(report.after_up(made, started, time.monotonic() - begun))
    return 0


def owner_from(pid: int | None) -> ProcessId | None:
    """Return the process that owns the cluster: after its end, `down --abandoned` removes the cluster."""
    if pid is None:
        return None
    owner = read_process(pid)
    if owner is None:
        raise Refusal(f"--owner-pid {pid} does not run", "give the pid of a running process")
    return owner


def do_down(parsed: argparse.Namespace) -> int:
    """Take a cluster, or all abandoned clusters, down."""
    requirements.require_root()
    if parsed.abandoned:
        names = lifecycle.down_abandoned()
        print(f"took down {', '.join(names)}" if names else "nothing was abandoned")
        return 0
    found = lifecycle.down(parsed.name, parsed.root)
    print(f"cluster {parsed.name} is {'down' if found else 'not there; nothing to do'}")
    return 0


def do_status(parsed: argparse.Namespace) -> int:
    """Print the state of one cluster, or list all clusters."""
    requirements.require_root()
    if parsed.all:
        print(report.all_clusters())
        return 0
    loaded = cluster.load(parsed.name, parsed.root)
    state = report.gather(loaded)
    print(report.as_json(state) if parsed.json else report.as_text(state))
    return 0


def do_shell(parsed: argparse.Namespace) -> int:
    """Open an interactive shell on a host."""
    parsed.program = ["bash", "-i"]
    parsed.env = [*parsed.env, f"TERM={os.environ.get('TERM', 'dumb')}"]
    return do_exec(parsed)


def do_exec(parsed: argparse.Namespace) -> int:
    """Replace this process with the program, so that signals, terminal and exit code are the program's."""
    requirements.require_root()
    if not parsed.program:
        raise Refusal("there is no command", "write `devcluster exec HOST -- COMMAND`")
    loaded = cluster.load(parsed.name, parsed.root)
    env = dict(options.parse_variable(text) for text in parsed.env)
    argv = loaded.argv(parsed.host, parsed.program, user=parsed.user, cwd=parsed.cwd, env=env)
    sys.stdout.flush()
    os.execvp(argv[0], argv)


def do_env(parsed: argparse.Namespace) -> int:
    """Print lines for eval."""
    loaded = cluster.load(parsed.name, parsed.root)
    print(wrappers.exports(loaded.layout, parsed.name), end="")
    return 0


def do_install(parsed: argparse.Namespace) -> int:
    """Install Debian's packages, or another version of Slurm or Apptainer next to the system's."""
    requirements.require_root()
    if parsed.apptainer:
        if parsed.slurm or parsed.accounting or parsed.shared_fs != "local":
            raise Refusal("--apptainer installs only Apptainer", "run `install` twice")
        print(apptainerinstall.install(requirements.install_environment()))
        return 0
    if parsed.slurm:
        if parsed.accounting or parsed.shared_fs != "local":
            raise Refusal("--slurm installs only Slurm", "run `install` twice, once without it")
        spec.check_version(parsed.slurm)
        print(slurminstall.install(parsed.slurm, requirements.install_environment()))
        return 0
    wanted = requirements.features(accounting=parsed.accounting, shared_fs=parsed.shared_fs)
    packages = [name for feature in wanted for name in feature.packages]
    for command in requirements.install_commands(packages):
        done = subprocess.run(command, env=requirements.install_environment(), check=False)
        if done.returncode != 0:
            raise Refusal(
                f"`{' '.join(command[:2])}` failed with {done.returncode}",
                "its own words are above; the tool knows Debian 12 and its relatives",
            )
    print(f"installed: {' '.join(packages)}")
    return 0


def fault(act: Callable[..., object], said: str, *operands: str) -> Command:
    """Return a command that injects one fault into a running cluster and prints one line.

    ``act`` gets the cluster and the options named ``operands``; ``said`` is the line, with options in braces.
    """

    def command(parsed: argparse.Namespace) -> int:
        requirements.require_root()
        target = cluster.load(parsed.name, parsed.root)
        act(target, *(getattr(parsed, name) for name in operands))
        print(said.format(**vars(parsed)))
        return 0

    return command


def do_kill_node(parsed: argparse.Namespace) -> int:
    """Simulate power loss of a node, or kill only its Slurm daemons."""
    if parsed.leave_orphans:
        said = "{host}: slurmd and its step daemons are dead, the job's processes live on"
        return fault(faults.leave_orphans, said, "host")(parsed)
    return fault(faults.lose_power, "{host}: everything on it is dead", "host")(parsed)


Command = Callable[[argparse.Namespace], int]

COMMANDS: dict[str, Command] = {
    "up": do_up,
    "down": do_down,
    "status": do_status,
    "shell": do_shell,
    "exec": do_exec,
    "env": do_env,
    "install": do_install,
    "kill-node": do_kill_node,
    "revive-node": fault(faults.revive, "{host}: slurmd has registered again", "host"),
    "cut-link": fault(faults.cut_link, "{host}: cut off", "host"),
    "slow-link": fault(faults.slow_link, "{host}: {rate} in both directions", "host", "rate"),
    "lossy-link": fault(
        faults.lossy_link,
        "{host}: {percent} % of the packets are dropped in both directions",
        *("host", "percent"),
    ),
    "restore-link": fault(faults.restore_link, "{host}: the link is whole", "host"),
    "stop": fault(faults.stop_daemon, "{daemon}: stopped", "daemon"),
    "start": fault(faults.start_daemon, "{daemon}: answers", "daemon"),
}
