"""The options of the command line."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from .errors import Refusal
from .faults import STOPPABLE
from .spec import SHARED_FILE_SYSTEMS, ClusterSpec, parse_gpus, parse_partition, parse_setting


def parser() -> argparse.ArgumentParser:
    """Return the parser of the whole command line."""
    top = argparse.ArgumentParser(
        prog="devcluster", description="A real multi-host Slurm on one machine."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_up(commands.add_parser("up", help="start a cluster, or its missing daemons"))
    add_down(commands.add_parser("down", help="remove a cluster and all its files"))
    add_status(commands.add_parser("status", help="show hosts, states and directories"))
    add_entry(
        commands.add_parser("shell", help="open an interactive shell on a host"),
        commands.add_parser("exec", help="run a command on a host: exec HOST -- COMMAND"),
    )
    add_name(commands.add_parser("env", help='lines for eval: eval "$(devcluster env)"'))
    install = commands.add_parser("install", help="install the required Debian packages")
    add_features(install)
    add_slurm(install, "this version next to the system's, from Debian's later suites")
    install.add_argument(
        "--apptainer", action="store_true", help="Apptainer for containers, from a later suite"
    )
    add_faults(commands)
    return top


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options, with the words after ``--`` as ``program``.

    argparse's REMAINDER would take the options between the host and ``--`` too.
    """
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    parsed = parser().parse_args(words[:cut])
    parsed.program = words[cut + 1 :]
    return parsed


def add_name(command: argparse.ArgumentParser) -> None:
    """Add the options that select a cluster."""
    command.add_argument(
        "--name",
        default=os.environ.get("DEVCLUSTER_NAME", "dev"),
        help="the cluster's name (default: $DEVCLUSTER_NAME, else dev)",
    )
    command.add_argument("--root", type=Path, help="its directory (default: /tmp/devcluster-NAME)")


def add_features(command: argparse.ArgumentParser) -> None:
    """Add the options for parts with extra packages."""
    command.add_argument(
        "--accounting", action="store_true", help="sacct, with slurmdbd and MariaDB"
    )
    command.add_argument(
        "--shared-fs",
        choices=SHARED_FILE_SYSTEMS,
        default="local",
        help="file system of the shared directory (default: the machine's disk)",
    )


def add_slurm(command: argparse.ArgumentParser, meaning: str) -> None:
    """Add the option for the version of Slurm."""
    command.add_argument("--slurm", default="", metavar="VERSION", help=f"as 24.11: {meaning}")


def add_up(command: argparse.ArgumentParser) -> None:
    """Add the options of `up`."""
    add_name(command)
    command.add_argument("--nodes", type=int, default=4, metavar="N")
    command.add_argument(
        "--gpus",
        default="4",
        metavar="N[,N...]",
        help="GPUs per node, or of each node (default: 4)",
    )
    command.add_argument(
        "--gpu-types",
        default="",
        metavar="TYPE[,TYPE...]",
        help="GPU type of all nodes, or of each node",
    )
    command.add_argument(
        "--cpus", type=int, default=16, metavar="N", help="declared CPUs per node (default: 16)"
    )
    command.add_argument(
        "--memory",
        type=int,
        default=64000,
        metavar="MB",
        help="declared memory per node (default: 64000)",
    )
    add_features(command)
    add_slurm(command, "a version of `install --slurm` (default: the system's)")
    command.add_argument(
        "--partitions",
        nargs="+",
        default=[],
        metavar="NAME[:Key=Value,...]",
        help="with Slurm's keys; the first is the default partition (default: batch and urgent)",
    )
    command.add_argument(
        "--grace", type=int, default=0, metavar="SECONDS", help="GraceTime of batch"
    )
    command.add_argument(
        "--preempt-user-signal",
        action="store_true",
        help="a preempted job gets the signal of its --signal option",
    )
    command.add_argument(
        "--realistic",
        action="store_true",
        help="Slurm's default delays: minutes instead of seconds",
    )
    command.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="Key=Value",
        help="any other line of slurm.conf; may be repeated",
    )
    command.add_argument("--user", default="hpcuser", help="user of the jobs (created if missing)")
    command.add_argument(
        "--owner-pid",
        type=int,
        metavar="PID",
        help="after the end of this process, `down --abandoned` removes the cluster",
    )


def add_down(command: argparse.ArgumentParser) -> None:
    """Add the options of `down`."""
    add_name(command)
    command.add_argument(
        "--abandoned", action="store_true", help="every cluster with an ended owner process"
    )


def add_status(command: argparse.ArgumentParser) -> None:
    """Add the options of `status`."""
    add_name(command)
    command.add_argument("--json", action="store_true", help="for programs")
    command.add_argument("--all", action="store_true", help="list every cluster of this machine")


def add_entry(shell: argparse.ArgumentParser, execute: argparse.ArgumentParser) -> None:
    """Add the commands that enter a host."""
    for command in (shell, execute):
        add_name(command)
        command.add_argument("--user", help="run as this user (default: the job user)")
        command.add_argument("--cwd", help="directory (default: the shared one)")
        command.add_argument(
            "--env", action="append", default=[], metavar="KEY=VALUE", help="may be repeated"
        )
    shell.add_argument("host", nargs="?", default="login")
    execute.add_argument("host")
    execute.usage = "devcluster exec HOST [--user U] [--cwd DIR] [--env K=V] -- COMMAND"


def add_faults(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the commands for fault injection."""
    made = {
        name: commands.add_parser(name, help=text)
        for name, text in {
            "kill-node": "simulate power loss of a node",
            "revive-node": "start a killed node again",
            "cut-link": "cut a host's link",
            "slow-link": "limit a host's bandwidth",
            "lossy-link": "drop a percentage of a host's packets",
            "restore-link": "undo cut-link, slow-link and lossy-link",
        }.items()
    }
    for command in made.values():
        add_name(command)
        command.add_argument("host")
    made["kill-node"].add_argument(
        "--leave-orphans",
        action="store_true",
        help="kill slurmd and its step daemons only; the job's processes survive",
    )
    made["slow-link"].add_argument("--rate", default="50mbit", help="(default: 50mbit)")
    made["lossy-link"].add_argument("--percent", type=int, default=20, help="(default: 20)")
    for name, text in {"stop": "stop a central daemon", "start": "start it again"}.items():
        command = commands.add_parser(name, help=text)
        add_name(command)
        command.add_argument("daemon", choices=STOPPABLE)


def spec_from(parsed: argparse.Namespace) -> ClusterSpec:
    """Return the spec that the options of `up` describe."""
    return ClusterSpec(
        name=parsed.name,
        nodes=parsed.nodes,
        gpus=parse_gpus(parsed.gpus),
        gpu_types=tuple(filter(None, parsed.gpu_types.split(","))),
        cpus=parsed.cpus,
        memory_mb=parsed.memory,
        user=parsed.user,
        shared_fs=parsed.shared_fs,
        accounting=parsed.accounting,
        realistic=parsed.realistic,
        grace_s=parsed.grace,
        preempt_user_signal=parsed.preempt_user_signal,
        partitions=tuple(parse_partition(text) for text in parsed.partitions),
        settings=tuple(parse_setting(text) for text in parsed.settings),
        slurm=parsed.slurm,
    )


def parse_variable(text: str) -> tuple[str, str]:
    """Return name and value of a ``KEY=VALUE`` variable."""
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise Refusal(f"--env {text!r} is not a variable", "write --env KEY=VALUE")
    return key, value


def arguments_of(spec: ClusterSpec) -> list[str]:
    """Return the options of `up` that describe ``spec``: the inverse of `spec_from`."""
    words = [
        *(f"--name={spec.name}", f"--nodes={spec.nodes}", f"--cpus={spec.cpus}"),
        *(f"--gpus={','.join(str(count) for count in spec.gpus)}", f"--memory={spec.memory_mb}"),
        *(f"--user={spec.user}", f"--shared-fs={spec.shared_fs}", f"--grace={spec.grace_s}"),
        *(f"--set={key}={value}" for key, value in spec.settings),
    ]
    if spec.gpu_types:
        words.append(f"--gpu-types={','.join(spec.gpu_types)}")
    if spec.slurm:
        words.append(f"--slurm={spec.slurm}")
    switches = {
        "--accounting": spec.accounting,
        "--realistic": spec.realistic,
        "--preempt-user-signal": spec.preempt_user_signal,
    }
    words += [word for word, wanted in switches.items() if wanted]
    if spec.partitions:
        words += ["--partitions", *(str(partition) for partition in spec.partitions)]
    return words
