"""The requests of a batch script that a user wrote: its ``#SBATCH`` lines as options of ``hpcrun submit``."""

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from hpcrun.api.submission.checks.launchers import program_of
from hpcrun.config import Config, Job, submit_options
from hpcrun.config.commands.starters import read_script
from hpcrun.config.slurm_options import parse_options

_LINE = re.compile(r"#SBATCH\s+(.*)")
# Options of sbatch for which hpcrun has another name, or which it sets itself.
_OWN = {
    **{"nodes": "nodes", "gpus-per-node": "gpus", "job-name": "name", "time": "time"},
    "cpus-per-task": "cpus_per_task",
    **{option.sbatch: key for key, (option, _) in submit_options(Job).items() if option.sbatch},
}
_DROPPED = frozenset({"output", "error", "open-mode", "requeue", "signal", "input", "export"})
_INTERPRETERS = {
    **{".py": "python", ".pl": "perl", ".R": "Rscript", ".r": "Rscript", ".jl": "julia"},
    **{".rb": "ruby", ".js": "node", ".lua": "lua", ".sh": "bash", ".bash": "bash"},
}
_TASKS = ("ntasks-per-node", "tasks-per-node", "gpus-per-task", "ntasks")


def requests_in(text: str, config: Config | None = None) -> Mapping[str, str]:
    """Return the options of ``hpcrun submit`` for the ``#SBATCH`` lines in the text of a script.

    Args:
        config: requests that it has already are not returned.
    """
    lines = [found[1] for line in text.splitlines() if (found := _LINE.match(line))]
    items = [word for line in lines for word in _words(line)]
    asked, rest = dict[str, str](), list[str]()
    tasks = ""
    for option in parse_options("sbatch", items):
        value = option.value or ""
        if option.name in _OWN:
            asked[_OWN[option.name]] = value
        elif option.name == "gres" and value.startswith("gpu"):
            asked["gpus"] = value.removeprefix("gpu").lstrip(":") or "1"
        elif option.name in ("ntasks-per-node", "tasks-per-node"):
            tasks = value
        elif option.name not in (*_DROPPED, *_TASKS):
            rest.append(f"--{option.name}={value}" if value else f"--{option.name}")
    if tasks and "gpus" not in asked:
        asked["gpus"] = tasks
    if config is not None:
        job = config.job
        typed = f"{job.gpu_type}:{job.gpus}" if job.gpu_type else job.gpus
        values = {**job.model_dump(), "name": config.name, "gpus": typed}
        asked = {key: value for key, value in asked.items() if not _has(values.get(key), value)}
        rest = [one for one in rest if one not in job.sbatch_args]
    return asked | ({"sbatch_args": ", ".join(rest)} if rest else {})


def _words(line: str) -> Sequence[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # an open quote
        return line.split()


def submit_words(requests: Mapping[str, str]) -> Sequence[str]:
    """Return the words of a command line for ``requests``."""
    words = []
    for key, value in requests.items():
        if key == "sbatch_args":
            words.append(shlex.quote(f"job.sbatch_args=[{value}]"))
        else:
            words.append(
                f"--{key.replace('_', '-')} {shlex.quote(value) if value else ''}".rstrip()
            )
    return words


def _has(own: object, asked: str) -> bool:
    if own is True:
        return asked == ""
    text = str(own)
    # For Slurm, 02:00:00 is 2:00:00.
    return text == asked or (":" in text and text.lstrip("0") == asked.lstrip("0"))


def how_to_submit(script: Path) -> str:
    """Return how to submit the file ``script``, given in the place of an override."""
    name = shlex.quote(str(script))
    text = read_script(script)
    asked = requests_in(text)
    if asked:
        words = " ".join([*submit_words(asked), "--", program_of(text) or "COMMAND"])
        return (
            f"a batch script is for sbatch: sbatch {name}; hpcrun writes its own, from the words: hpcrun "
            f"submit {words}"
        )
    if script.suffix == ".ipynb":
        return f"a notebook is no program; convert it first: jupyter nbconvert --to script {name}"
    program = f"{_INTERPRETERS.get(script.suffix, 'bash')} {name}"
    if script.suffix not in _INTERPRETERS and os.access(script, os.X_OK):
        program = name if "/" in name else f"./{name}"
    return f"a program to run comes after `--`: -- {program}"
