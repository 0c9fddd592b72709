"""The user's command: its program, its launcher, and the checks before it starts.

Each copy of such a program would train another model, and every copy would succeed.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpcrun.config import Config
from hpcrun.config.commands.program_file import (
    missing_script,
    require_no_notebook,
    require_runnable,
)
from hpcrun.config.commands.starters import LAUNCHERS, PYTHON, SHELLS, rank_starter, shell_runs
from hpcrun.errors import UserError


def check_command(config: Config, folder: Path) -> None:
    """Check the files of the command of ``config``, if any.

    Args:
        folder: the ranks' working folder.

    Raises:
        UserError: its script does not exist, or the launcher cannot start it.
    """
    job = config.job
    if not config.command:
        return
    if job.launcher is not None:
        require_script(job.launcher, config.command, folder)
    # The files of a container are unknown here.
    if not (job.container or job.image):
        require_there(
            config.command,
            folder,
            launched=job.launcher is not None,
            here=job.executor in ("local", "debug"),
            prepared_by=[*job.setup, *job.node_setup],
        )


def require_there(
    command: Sequence[str],
    folder: Path,
    *,
    launched: bool,
    here: bool,
    prepared_by: Sequence[str],
) -> None:
    """Check that the script of ``command`` exists, if this can be known before the job runs.

    A relative path can be checked: the ranks work in ``folder`` too. An absolute path may be on nodes only.

    Args:
        launched: a launcher starts the command, which begins with the script or the launcher's options.
        here: the job runs on this machine.
        prepared_by: the lines of the set-up, which may create the script.

    Raises:
        UserError: the script does not exist, or needs an interpreter.
    """
    if not launched:
        require_runnable(command, folder)
    script = script_of(command, launched)
    if script is None:
        return
    require_no_notebook(script)
    if (folder / script).exists():
        return
    path = Path(script)
    known = here or not path.is_absolute() or path.is_relative_to(folder)
    first = next((part for part in path.parts if part not in ("/", ".", "..")), "")
    if known and not any(first in line for line in prepared_by):
        raise UserError(missing_script(script, command, folder))


def is_python(command: Sequence[str]) -> bool:
    """Return True if ``command`` starts a Python program: by an interpreter, or through a shell script."""
    name = Path(command[0]).name
    return bool(PYTHON.fullmatch(name)) or name.endswith(".py") or name in SHELLS


def script_of(command: Sequence[str], launched: bool = False) -> str | None:
    """Return the script that ``command`` runs, if its words show it."""
    name = Path(command[0]).name
    if launched or name in LAUNCHERS:
        if "-m" in command or "--module" in command:
            return None
        return next((word for word in command if word.endswith(".py")), None)
    if PYTHON.fullmatch(name):
        return _python_script(command)
    if name in SHELLS:
        text, word = shell_runs(command)
        return None if text else word
    return command[0] if "/" in command[0] else None


def _python_script(words: Sequence[str]) -> str | None:
    """Return the script of ``python SCRIPT``; None for a module, a text and the standard input."""
    rest = iter(words[1:])
    for word in rest:
        if word in ("-W", "-X"):
            next(rest, None)
        elif word == "-" or re.match(r"-[bBdEiIOPqsSuvx]*[cm]", word):
            return None
        elif not word.startswith("-"):
            return word
    return None


def require_script(launcher: str, command: Sequence[str], folder: Path) -> None:
    """Check that ``command`` is a script for ``launcher``, perhaps after options of the launcher.

    Raises:
        UserError: the command begins with an interpreter, or starts its own ranks.
    """
    found = rank_starter(command, folder)
    if found is not None:
        raise UserError(
            f"--launcher {launcher}: the command after `--` starts its ranks by itself ({found.name}); write "
            "only the script, or remove --launcher"
        )
    if PYTHON.fullmatch(Path(command[0]).name):
        raise UserError(
            f"--launcher {launcher}: the command begins with {command[0]}; write only the script: -- train.py"
        )
    if launcher == "accelerate" and "--cpu" in _before_script(command):
        raise UserError(
            "--launcher accelerate: after `--` the option --cpu means one process on a node; write --cpu "
            "before `--`"
        )


def _before_script(words: Sequence[str]) -> Sequence[str]:
    """Return the words before the script; the same names after it are options of the script."""
    script = next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))
    return words[:script]


LauncherName = Literal["torchrun", "accelerate"]

# The launchers have no handler for the warning before a time limit: they and their ranks would die of
# it. A rank that sets a handler still receives the signal.
_OUTLIVE_WARNING = 'trap "" USR1 USR2; exec "$@"'
_PACKAGES: Mapping[LauncherName, str] = {"torchrun": "torch", "accelerate": "accelerate"}
# Seconds for an interpreter on a slow file system.
_ANSWER = 60.0
# With one of these options, accelerate starts its ranks correctly.
_CHOSEN = frozenset(
    {
        *("--config-file", "--multi-gpu", "--tpu", "--use-deepspeed", "--use-fsdp"),
        "--use-megatron-lm",
    }
)


@dataclass(frozen=True)
class Launcher:
    """A launcher that starts ``ranks`` ranks on each node, with the interpreter ``python``."""

    name: LauncherName
    ranks: int
    python: str

    def words(self, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """Return this task's command line, so that ``command`` becomes one training over all nodes.

        Args:
            command: the script and its arguments, after options of the launcher if there are any.
            environ: the variables of the task: WORLD_SIZE counts the nodes, RANK is this node.
        """
        if self.name == "torchrun":
            own = _torchrun(self.ranks, environ)
        else:
            own = _accelerate(self.ranks, command, environ)
        return ["sh", "-c", _OUTLIVE_WARNING, "sh", self.python, "-m", *own, *command]


def launching_python(asked: str | None, name: LauncherName) -> str:
    """Return the interpreter for the launcher ``name``.

    A job that names an interpreter runs the worker with it. Otherwise `python` on PATH comes first, as in the
    user's own shell. The worker's interpreter is used if only it has the launcher, for example after a
    submission with the full path of an environment's Python, which leaves PATH unchanged.

    Args:
        asked: ``job.python``.
    """
    found = None if asked else shutil.which("python") or shutil.which("python3")
    if found is None:
        return sys.executable
    package = _PACKAGES[name]
    only_here = importlib.util.find_spec(package) is not None and not _has(found, package)
    return sys.executable if only_here else found


def _has(python: str, package: str) -> bool:
    """Return True if ``python`` finds ``package``; True if the answer takes too long."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        asked = subprocess.run(
            [python, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False
    return asked.returncode == 0


def _torchrun(ranks: int, environ: Mapping[str, str]) -> list[str]:
    return [
        "torch.distributed.run",
        f"--nnodes={environ['WORLD_SIZE']}",
        f"--node-rank={environ['RANK']}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={environ['MASTER_ADDR']}",
        f"--master-port={environ['MASTER_PORT']}",
    ]


def _accelerate(ranks: int, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    machines = int(environ["WORLD_SIZE"])
    given = {word.partition("=")[0].replace("_", "-") for word in _before_script(command)}
    # Without --multi_gpu, nodes with one GPU would each train a model. On CPUs it is the only way to
    # several processes without MPI. It would override the user's file of defaults.
    plain = machines * ranks > 1 and given.isdisjoint(_CHOSEN) and not _has_defaults(environ)
    return [
        "accelerate.commands.launch",
        *(["--multi_gpu"] if plain else []),
        f"--num_machines={machines}",
        f"--machine_rank={environ['RANK']}",
        f"--num_processes={machines * ranks}",
        f"--main_process_ip={environ['MASTER_ADDR']}",
        f"--main_process_port={environ['MASTER_PORT']}",
    ]


def _has_defaults(environ: Mapping[str, str]) -> bool:
    """Return True if `accelerate config` has written a file (accelerate.commands.config.config_args)."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    folder = Path(environ.get("HF_HOME") or cache) / "accelerate"
    return (folder / "default_config.yaml").is_file()
