"""Check that the Python of a command has the packages that its script imports."""

import ast
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from hpcrun.api.submission.checks.concern import Concern, Submission
from hpcrun.config.slurm_options import parse_options
from hpcrun.job.script.command import script_of
from hpcrun.job.script.starters import PYTHON

_ASK = """
import importlib.util, sys
folder, *names = sys.argv[1:]
sys.path[0] = folder
print(*(name for name in names if importlib.util.find_spec(name) is None))
"""
_SECONDS = 5.0
# With these, the modules of a job are not those of this shell.
_MOVES = ("sys.path", "addsitedir", "importlib", "__import__")
_VARIABLES = frozenset({"PATH", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV"})


def missing_packages(submission: Submission) -> Iterator[Concern]:
    """Find packages that the script imports at its start, and that the command's interpreter has not.

    Silent if the job prepares another environment (``job.setup``, ``job.image``, variables, a container of
    Slurm), or if the interpreter does not answer.
    """
    job, command = submission.config.job, submission.config.command or []
    if job.setup or job.image or _VARIABLES & set(job.env):
        return
    given = [*parse_options("sbatch", job.sbatch_args), *parse_options("srun", job.srun_args)]
    if any(option.name.startswith("container") for option in given):
        return
    if not command or not PYTHON.fullmatch(Path(command[0]).name):
        return
    interpreter = shutil.which(command[0])
    script = script_of(command)
    if interpreter is None or script is None or not script.endswith(".py"):
        return
    path = submission.folder / script
    missing = _missing(interpreter, path, imported(path))
    if missing:
        names = " and ".join(missing)
        package = "it" if len(missing) == 1 else "them"
        yield Concern(
            f"{script} imports {names}, and {interpreter} has no such package; install {package} there, or "
            "activate the right environment, now or in job.setup"
        )


def imported(script: Path) -> list[str]:
    """Return the packages that a Python script imports unconditionally when it starts.

    An import in a function, or inside ``try`` or ``if``, may not happen. The list is empty if the script
    cannot be read, or changes the places in which Python looks.
    """
    try:
        text = script.read_text()
        body = ast.parse(text).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    if any(word in text for word in _MOVES):
        return []
    names: list[str] = []
    for node in body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    return list(dict.fromkeys(name.partition(".")[0] for name in names))


def _missing(interpreter: str, script: Path, names: list[str]) -> list[str]:
    if not names:
        return []
    folder = str(script.resolve().parent)
    try:
        asked = subprocess.run(
            [interpreter, "-c", _ASK, folder, *names],
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError):
        return []
    return asked.stdout.split()
