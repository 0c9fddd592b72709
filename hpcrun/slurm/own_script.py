"""The options in a batch script that a person submits: those that would undo the restarts of hpcrun.

sbatch takes an option from its command line, then from a variable such as ``SBATCH_SIGNAL``, then from a line
``#SBATCH`` (sbatch(1)). Its command line is not known in the job, so nothing is refused.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from hpcrun.config.slurm_options import parse_options

_LINE = re.compile(r"#SBATCH\s+(.*)")
_VARIABLES = {
    "SBATCH_SIGNAL": "signal",
    "SBATCH_OPEN_MODE": "open-mode",
    "SBATCH_NO_REQUEUE": "no-requeue",
}
_MOST_BYTES = 1 << 16


def script_text(process: int) -> str:
    """Return the batch script that the shell ``process`` runs; empty if it cannot be found."""
    try:
        words = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
        with Path(words[1].decode()).open(errors="replace") as file:
            return file.read(_MOST_BYTES)
    except (OSError, IndexError, UnicodeError):
        return ""


def restart_problems(text: str, environ: Mapping[str, str]) -> list[str]:
    """Return a line for each option of a batch script that takes restarts or logs away.

    Args:
        text: the batch script.
        environ: the environment from sbatch.
    """
    items = [found[1] for line in text.splitlines() if (found := _LINE.match(line))]
    given = {one.name: (one.text, one.value or "") for one in parse_options("sbatch", items)}
    for variable, name in _VARIABLES.items():
        if variable in environ:
            given[name] = (f"{variable}={environ[variable]}", environ[variable])
    lines = []
    shown, value = given.get("signal", ("", ""))
    if re.match(r"[Rr]?[Bb][Rr]?:", value):
        lines.append(
            f"{shown}: B: sends the signal to the batch shell, which dies of it, and not to the ranks, which "
            "save; write #SBATCH --signal=USR2@90"
        )
    shown, value = given.get("open-mode", ("", "append"))
    if value.lower() not in ("a", "append"):
        lines.append(
            f"{shown}: a restart erases the log of the earlier starts; write #SBATCH --open-mode=append"
        )
    shown, _ = given.get("no-requeue", ("", ""))
    if shown:
        lines.append(
            f"{shown}: Slurm does not start the job again after the loss of its first node; write #SBATCH "
            "--requeue"
        )
    return lines
