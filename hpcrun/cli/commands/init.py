"""Write a small program that trains, and its config. Asks three questions.

Without a terminal, or without the questions:
  hpcrun init --kind script --file train.py --size 2x4
"""

import argparse
import re
import shlex
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from hpcrun.errors import UserError
from hpcrun.printing import say

_KINDS = {
    "script": "a script in plain PyTorch; hpcrun.resumable makes it resume exactly",
    "task": "a model, data and a loss for hpcrun's loop (DDP, FSDP, mixed precision)",
    "lightning": "a script with Lightning",
    "transformers": "a script with the Trainer of transformers",
}
_FILES = {"task": "my_task.py"}
_PROGRAMS = Path(__file__).parents[1] / "programs"
_CONFIG = """\
# Submit: hpcrun submit -c {config}     (on this machine: --executor local)
# Every key and its default: hpcrun config show -c {config}
{what}
job:
  nodes: {nodes}
  gpus: {gpus}                  # ranks per node, one for each GPU
  time: "01:00:00"
  # partition: gpu
  # account: my_account
"""
_TASK = """\
task: {module}:MyTask

train:
  steps: 500
  batch_size: 32         # samples of all ranks in one step
  lr: 0.01

checkpoint:
  every: 100
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--kind", choices=_KINDS, help="what to begin with")
    parser.add_argument("--file", type=Path, metavar="FILE", help="the program, such as train.py")
    parser.add_argument("--size", metavar="NxG", help="nodes, and GPUs on each, such as 2x4")


def run(arguments: argparse.Namespace) -> int:
    """Ask for what no option gives, write both files, and print the next command."""
    kind = arguments.kind or _asked(
        "--kind", f"What do you begin with: {', '.join(_KINDS)}?", "script", _check_kind
    )
    name = _FILES.get(kind, "train.py")
    file = Path(arguments.file or _asked("--file", "Which file?", name, partial(_check_file, kind)))
    question = "How many nodes, and GPUs on each?"
    size = arguments.size or _asked("--size", question, "1x1", _check_size)
    config = _write(kind, file, size)
    say(f"hpcrun: {file}: {_KINDS[kind]}", f"hpcrun: {config}: nodes, GPUs and time limit")
    package = kind if kind in ("lightning", "transformers") else "torch"
    if find_spec(package) is None:
        say(f"hpcrun: the program needs {package}: pip install {package}")
    say(f"next: hpcrun submit -c {shlex.quote(str(config))}")
    return 0


def _asked(option: str, question: str, default: str, check: Callable[[str], object]) -> str:
    """Return the first answer on the terminal for which ``check`` raises nothing.

    Raises:
        UserError: there is no terminal and no default, or the input ends.
    """
    if not sys.stdin.isatty():
        if option == "--kind":
            raise UserError(f"init: there is no terminal to ask; give {option} {'|'.join(_KINDS)}")
        return default
    while True:
        try:
            answer = input(f"{question} [{default}] ").strip() or default
        except EOFError as error:
            raise UserError(f"init: no answer; give {option}. Nothing was written") from error
        try:
            check(answer)
        except UserError as error:
            say(f"hpcrun: {error}")
        else:
            return answer


def _check_kind(kind: str) -> None:
    if kind not in _KINDS:
        raise UserError(f"{kind}: should be {', '.join(_KINDS)}")


def _check_size(size: str) -> re.Match[str]:
    found = re.fullmatch(r"([1-9]\d{0,4})x([1-9]\d{0,2})", size.strip())
    if found is None:
        raise UserError(f"--size {size}: should be nodes x GPUs, such as 2x4")
    return found


def _check_file(kind: str, name: str) -> None:
    file = Path(name)
    if file.suffix != ".py" or (kind == "task" and not file.stem.isidentifier()):
        words = "be a name of Python with .py" if kind == "task" else "end with .py"
        raise UserError(f"--file {file}: should {words}")
    if file.stem in sys.stdlib_module_names or _is_installed(file.stem):
        raise UserError(f"--file {file}: would hide the package {file.stem}; choose another name")
    if kind == "task" and file.parent != Path():
        raise UserError(f"--file {file}: a task is a module of this folder; give a name without /")
    for path in (file, file.with_suffix(".yaml")):
        if path.exists():
            raise UserError(f"{path}: exists already; name another --file")


def _is_installed(name: str) -> bool:
    if name in ("hpcrun", "torch", "lightning", "transformers"):
        return True
    found = find_spec(name) if name.isidentifier() else None
    # `python -m hpcrun` finds the files of this folder too.
    return found is not None and Path(found.origin or ".").parent.absolute() != Path.cwd()


def _write(kind: str, file: Path, size: str) -> Path:
    """Write the program and its config, and return the config's path; both or none.

    Raises:
        UserError: an answer is wrong, or a file exists.
    """
    found = _check_size(size)
    _check_file(kind, str(file))
    config = file.with_suffix(".yaml")
    what = f'command: [python, "{file}"]\n' if kind != "task" else _TASK.format(module=file.stem)
    contents = {
        file: (_PROGRAMS / f"{kind}.txt")
        .read_text(encoding="utf-8")
        .replace("CONFIG", str(config)),
        config: _CONFIG.format(config=config, what=what, nodes=found[1], gpus=found[2]),
    }
    made: list[Path] = []
    try:
        for path, text in contents.items():
            with path.open("x", encoding="utf-8") as stream:
                made.append(path)
                stream.write(text)
    except OSError as error:
        for one in made:
            one.unlink(missing_ok=True)
        exists = isinstance(error, FileExistsError)
        words = (
            "exists already; name another --file"
            if exists
            else f"cannot be written: {error.strerror}"
        )
        raise UserError(f"{path}: {words}") from error
    return config
