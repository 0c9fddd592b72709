"""The words that the command line understands, apart from what is done with them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

from .errors import Refusal
from .faults import STOPPABLE
from .spec import SHARED_FILE_SYSTEMS, ClusterSpec, parse_gpus, parse_partition, parse_setting


def parser() -> argparse.ArgumentParser:
    """The whole command line."""
    top = argparse.ArgumentParser(
        prog="devcluster", description="A real multi-host Slurm on one machine."
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_up(commands.add_parser("up", help="bring a cluster up, or mend one that is up"))
    add_down(commands.add_parser("down", help="remove a cluster and all that belongs to it"))
    add_status(commands.add_parser("status", help="hosts, their states, where things lie"))
    add_entry(
        commands.add_parser("shell", help="an interactive shell on a host"),
        commands.add_parser("exec", help="run a command on a host: exec HOST -- COMMAND"),
    )
    add_name(commands.add_parser("env", help='lines for eval: eval "$(devcluster env)"'))
    install = commands.add_parser("install", help="install the Debian packages it needs")
    add_features(install)
    add_slurm(install, "this version next to the system's, from Debian's later suites")
    add_faults(commands)
    return top


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options, and as ``program`` the words after ``--``, which are not ours to read.

    argparse's own REMAINDER would swallow the options between the host and ``--``.
    """
    words = list(arguments)
    cut = words.index("--") if "--" in words else len(words)
    parsed = parser().parse_args(words[:cut])
    parsed.program = words[cut + 1 :]
    return parsed


def add_name(command: argparse.ArgumentParser) -> None:
    """Which cluster."""
    command.add_argument(
        "--name",
        default=os.environ.get("DEVCLUSTER_NAME", "dev"),
        help="the cluster's name (default: $DEVCLUSTER_NAME, else dev)",
    )
    command.add_argument("--root", type=Path, help="its directory (default: /tmp/devcluster-NAME)")


def add_features(command: argparse.ArgumentParser) -> None:
    """The parts that need packages of their own."""
    command.add_argument(
        "--accounting", action="store_true", help="sacct, with slurmdbd and MariaDB"
    )
    command.add_argument(
        "--shared-fs",
        choices=SHARED_FILE_SYSTEMS,
        default="local",
        help="what the shared directory lies on (default: the machine's own disk)",
    )


def add_slurm(command: argparse.ArgumentParser, meaning: str) -> None:
    """The version of Slurm."""
    command.add_argument("--slurm", default="", metavar="VERSION", help=f"as 24.11: {meaning}")


def add_up(command: argparse.ArgumentParser) -> None:
    """Everything that decides how a cluster is built."""
    add_name(command)
    command.add_argument("--nodes", type=int, default=4, metavar="N")
    command.add_argument(
        "--gpus", default="4", metavar="N[,N...]", help="a node, or of each node (default: 4)"
    )
    command.add_argument(
        "--gpu-types", default="", metavar="TYPE[,TYPE...]", help="of all nodes, or of each node"
    )
    command.add_argument(
        "--cpus", type=int, default=16, metavar="N", help="that a node poses with (default: 16)"
    )
    command.add_argument(
        "--memory", type=int, default=64000, metavar="MB", help="that a node poses with"
    )
    add_features(command)
    add_slurm(command, "what `install --slurm` installed (default: the system's)")
    command.add_argument(
        "--partitions",
        nargs="+",
        default=[],
        metavar="NAME[:Key=Value,...]",
        help="in Slurm's own keys, the first is the default (default: batch and urgent)",
    )
    command.add_argument(
        "--grace", type=int, default=0, metavar="SECONDS", help="GraceTime of batch"
    )
    command.add_argument(
        "--preempt-user-signal",
        action="store_true",
        help="a preempted job gets the signal it asked for with --signal",
    )
    command.add_argument(
        "--realistic", action="store_true", help="Slurm's own delays, minutes instead of seconds"
    )
    command.add_argument(
        "--set",
        dest="settings",
        action="append",
        default=[],
        metavar="Key=Value",
        help="any other line of slurm.conf; may be repeated",
    )
    command.add_argument("--user", default="hpcuser", help="whose jobs run (made if missing)")
    command.add_argument(
        "--owner-pid",
        type=int,
        metavar="PID",
        help="once this process has ended, `down --abandoned` removes the cluster",
    )


def add_down(command: argparse.ArgumentParser) -> None:
    """Which clusters go."""
    add_name(command)
    command.add_argument(
        "--abandoned", action="store_true", help="every cluster whose owner process has ended"
    )


def add_status(command: argparse.ArgumentParser) -> None:
    """In which form, and of which."""
    add_name(command)
    command.add_argument("--json", action="store_true", help="for programs")
    command.add_argument("--all", action="store_true", help="list every cluster of this machine")


def add_entry(shell: argparse.ArgumentParser, execute: argparse.ArgumentParser) -> None:
    """Ways onto a host."""
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
    """What may befall a cluster."""
    made = {
        name: commands.add_parser(name, help=text)
        for name, text in {
            "kill-node": "a node loses power",
            "revive-node": "a killed node comes back",
            "cut-link": "a host's cable is pulled",
            "slow-link": "a host's bandwidth is limited",
            "lossy-link": "a share of a host's packets is dropped",
            "restore-link": "undo cut-link, slow-link and lossy-link",
        }.items()
    }
    for command in made.values():
        add_name(command)
        command.add_argument("host")
    made["kill-node"].add_argument(
        "--leave-orphans",
        action="store_true",
        help="kill slurmd and its step daemons only; the job's processes live on",
    )
    made["slow-link"].add_argument("--rate", default="50mbit", help="(default: 50mbit)")
    made["lossy-link"].add_argument("--percent", type=int, default=20, help="(default: 20)")
    for name, text in {"stop": "end a central daemon", "start": "start it again"}.items():
        command = commands.add_parser(name, help=text)
        add_name(command)
        command.add_argument("daemon", choices=STOPPABLE)


def spec_from(parsed: argparse.Namespace) -> ClusterSpec:
    """The spec that the options of `up` describe."""
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
    """``KEY=VALUE`` of an environment."""
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise Refusal(f"--env {text!r} is not a variable", "write --env KEY=VALUE")
    return key, value


def arguments_of(spec: ClusterSpec) -> list[str]:
    """The options of `up` that describe ``spec``: the inverse of `spec_from`."""
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
