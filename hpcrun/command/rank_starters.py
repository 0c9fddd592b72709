"""Programs that start their own ranks, and a warning if hpcrun would start them in several tasks.

Each copy of such a program would train another model, and every copy would succeed.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrun.errors import UserError

_MODULES = {
    "torch.distributed.run": "python -m torch.distributed.run",
    "torch.distributed.launch": "python -m torch.distributed.launch",
    "accelerate.commands.launch": "accelerate launch",
    "deepspeed.launcher.runner": "deepspeed",
}
_COUNTS = ("--nnodes", "--num-machines", "--num-nodes")
_MEETINGS = ("--rdzv-endpoint", "--node-rank", "--machine-rank", "--hostfile")
_PYTHON = re.compile(r"python(3(\.\d+)?)?")
# `python -um MODULE`, `python -mMODULE`.
_MODULE_OPTION = re.compile(r"^-[A-Za-z]*?m")
_COMMENT = re.compile(r"(^|\s)#.*")
_BETWEEN_COMMANDS = re.compile(r"[\n;&|()]+")
_MOST_BYTES = 1 << 16


def rank_starter(command: Sequence[str], folder: Path) -> tuple[str, Sequence[str]] | None:
    """Return the first launcher of ranks in ``command``, as a person writes it, and the words from it on.

    The words of the command are read, and those of a shell's text or script. Words after the script of a
    launcher are options of the script.

    Args:
        folder: the working folder, where the scripts of shells are read.
    """
    for words in _commands(command, folder):
        for at in range(len(_options(words))):
            if name := _launcher(words[at:]):
                return name, words[at:]
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
    name, words = found
    counted = _value(words, _COUNTS)
    remedy = (
        "`--launcher torchrun -- train.py` starts one training over all nodes"
        if name != "accelerate launch"
        else "`--launcher accelerate -- train.py` starts one training over all nodes"
    )
    started = f"{name} starts its own ranks, and each of the {copies} tasks ({nodes} x {tasks})"
    if counted in (None, "1") and _value(words, _MEETINGS) is None:
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
    if _PYTHON.fullmatch(Path(command[0]).name):
        raise UserError(
            f"--launcher {launcher}: the command begins with {command[0]}; write only the script: -- train.py"
        )
    if launcher == "accelerate" and "--cpu" in _options(command):
        raise UserError(
            "--launcher accelerate: after `--` the option --cpu means one process on a node; write --cpu "
            "before `--`"
        )


def _commands(command: Sequence[str], folder: Path) -> Iterator[Sequence[str]]:
    """Yield ``command``, and each command in the text or the script of its shell."""
    yield command
    for word in command:
        script = _is_script(word)
        if script and word.endswith(".py"):
            return
        text = _read(folder / word) if script else word if " " in word else ""
        lines = (_COMMENT.sub("", line) for line in text.replace("\\\n", " ").splitlines())
        for line in _BETWEEN_COMMANDS.split("\n".join(lines)):
            yield line.split()
        if script:
            return


def _launcher(words: Sequence[str]) -> str | None:
    """Return the launcher with which ``words`` begin."""
    name = Path(words[0]).name
    if name in ("torchrun", "deepspeed"):
        return name
    if name == "accelerate" and words[1:2] == ["launch"]:
        return "accelerate launch"
    return _MODULES.get(_MODULE_OPTION.sub("", words[0], count=1))


def _options(words: Sequence[str]) -> Sequence[str]:
    """Return the words before the script; the same names after it are options of the script."""
    return words[: next((at for at, word in enumerate(words) if _is_script(word)), len(words))]


def _is_script(word: str) -> bool:
    return word.endswith((".py", ".sh")) and " " not in word


def _value(words: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the value of the first of these options; "" for one without a value, None without the option."""
    options = _options(words)
    for at, word in enumerate(options):
        name, equals, value = word.partition("=")
        if "--" + name.lstrip("-").replace("_", "-") in names and name.startswith("-"):
            return value if equals else "".join(options[at + 1 : at + 2])
    return None


def _read(path: Path) -> str:
    try:
        if not path.is_file() or path.stat().st_size > _MOST_BYTES:
            return ""
        return path.read_text(errors="replace")
    except OSError:
        return ""
