"""Programs that start their own ranks, and a warning if hpcrun would start them in several tasks.

Each copy of such a program would train another model, and every copy would succeed.
"""

from collections.abc import Sequence
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.job.command.visible import Program, programs, python_module

_MODULES = {
    "torch.distributed.run": "python -m torch.distributed.run",
    "torch.distributed.launch": "python -m torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed": "deepspeed",
    "deepspeed.launcher.runner": "deepspeed",
}
_COUNTS = ("--nnodes", "--num-machines", "--num-nodes")
_MEETINGS = ("--rdzv-endpoint", "--node-rank", "--machine-rank", "--hostfile")


def rank_starter(command: Sequence[str], folder: Path) -> tuple[str, Program] | None:
    """Return the first program in ``command`` that starts its own ranks, with its name in words."""
    for program in programs(command, folder):
        name = _name(program)
        if name is not None:
            return name, program
    return None


def separate_trainings(
    command: Sequence[str], folder: Path, *, nodes: int, tasks: int
) -> str | None:
    """Return a warning if each task would start its own ranks; None if no problem is visible.

    Args:
        nodes: of the job.
        tasks: on each node.
    """
    found = rank_starter(command, folder)
    copies = nodes * tasks
    if found is None or copies == 1:
        return None
    name, program = found
    counted = _value(program.words, _COUNTS)
    remedy = (
        "`--launcher torchrun -- train.py` starts one training over all nodes"
        if name != "accelerate launch"
        else "`--launcher accelerate -- train.py` starts one training over all nodes"
    )
    started = f"{name} starts its own ranks, and each of the {copies} tasks ({nodes} x {tasks})"
    if counted in (None, "1") and _value(program.words, _MEETINGS) is None:
        return f"{started} would start it: {copies} separate trainings; {remedy}"
    if counted is not None and counted.isdecimal() and int(counted) not in (1, copies):
        return (
            f"{started} would start it, but it expects {counted} nodes; {remedy}, and "
            "--tasks-per-node 1 starts it once a node"
        )
    return None


def require_script(launcher: str, command: Sequence[str], folder: Path) -> None:
    """Check that ``command`` is a script for ``launcher``, perhaps after options of the launcher.

    Raises:
        UserError: the command begins with an interpreter, or starts its own ranks.
    """
    found = rank_starter(command, folder)
    if found is not None:
        raise UserError(
            f"--launcher {launcher}: the command after `--` starts its ranks by itself ({found[0]}); write "
            "only the script, or remove --launcher"
        )
    if Program(command, direct=True).is_python:
        raise UserError(
            f"--launcher {launcher}: the command begins with {command[0]}; write only the script: -- train.py"
        )
    if launcher == "accelerate" and "--cpu" in _options(command):
        raise UserError(
            "--launcher accelerate: after `--` the option --cpu means one process on a node; write --cpu "
            "before `--`"
        )


def _name(program: Program) -> str | None:
    words = program.words
    if program.name in ("torchrun", "deepspeed"):
        return program.name
    if program.name == "accelerate":
        return "accelerate launch" if "launch" in words[1:2] else None
    return _MODULES.get(python_module(words) or "") if program.is_python else None


def _options(words: Sequence[str]) -> Sequence[str]:
    """Return the words before the script; the same names after it are options of the script."""
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    return words[:script]


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the value of the first of these options; "" for one without a value, None without the option."""
    options = _options(words)
    for at, word in enumerate(options):
        name, equals, value = word.partition("=")
        if "--" + name.lstrip("-").replace("_", "-") in names and name.startswith("-"):
            return value if equals else "".join(options[at + 1 : at + 2])
    return None
