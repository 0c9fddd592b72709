"""The function that runs Slurm's programs, and the queries that every command needs.

SLURM_TIME_FORMAT requests Unix seconds, which avoids time zones and the repeated hour in
autumn.
"""

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

TIMED_OUT = 124
NOT_FOUND = 127


@dataclass(frozen=True)
class Completed:
    """The result of a program: ``returncode`` is 124 after a timeout, 127 if it is not installed."""

    returncode: int
    stdout: str
    stderr: str


def run(
    argv: Sequence[str], timeout: float = 10.0, environ: Mapping[str, str] | None = None
) -> Completed:
    """Run a program to its end and return its output; no other function runs Slurm's programs.

    It never raises: a missing program, or a program slower than ``timeout`` seconds, gives a return
    code (127, 124) with a line in ``stderr``.
    Args:
        argv: program and arguments; no shell sees them.
        timeout: seconds before it is killed. squeue takes 18 s to notice a dead controller.
        environ: the exact environment (for sbatch, which passes it to the job). None: that of this
            process, without the user's defaults that would change the answer.
    """
    try:
        done = subprocess.run(
            list(argv),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout,
            # A second Ctrl-C must not end the scancel that the first Ctrl-C caused.
            start_new_session=True,
            env=_plain_environment(os.environ) if environ is None else dict(environ),
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Completed(TIMED_OUT, "", f"{argv[0]} timed out after {timeout:g} s")
    except OSError as error:
        return Completed(NOT_FOUND, "", f"cannot run {argv[0]}: {error.strerror}")
    return Completed(done.returncode, done.stdout, done.stderr)


def _plain_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Drop variables that change an answer (SQUEUE_STATES, SLURM_CLUSTERS …); fix language and time format.

    The user's default cluster goes to sbatch as job.cluster. Each later query names the cluster of the
    job.
    """
    changing = ("SQUEUE_", "SACCT_", "SCONTROL_", "SCANCEL_", "SINFO_", "SLURM_CLUSTERS")
    kept = {name: value for name, value in environ.items() if not name.startswith(changing)}
    return kept | {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}


def configured(timeout: float = 3.0) -> bool:
    """Return True if jobs go to Slurm here: sbatch is on PATH and has a configured cluster.

    The controller may be slow or unreachable: a user of a cluster does not want to compute on its login host.
    """
    if shutil.which("sbatch") is None:
        return False
    return "configuration source" not in run(["scontrol", "ping"], timeout=timeout).stderr


def cluster_name(timeout: float = 6.0) -> str | None:
    """Return the name of this host's cluster; None if no controller answers.

    Slurm's programs use the file that $SLURM_CONF names (slurm.conf(5)): then no query is necessary.
    """
    named = os.environ.get("SLURM_CONF")
    return (named and _name_in(Path(named))) or parse_cluster_name(
        run(["scontrol", "show", "config"], timeout=timeout).stdout
    )


def _name_in(path: Path) -> str | None:
    """Return the ``ClusterName`` of a slurm.conf; None if the file does not have it, or cannot be read."""
    try:
        found = re.search(r"(?im)^\s*ClusterName\s*=\s*([^\s#]+)", path.read_text(errors="replace"))
    except OSError:
        return None
    return found and found[1].lower()


def parse_cluster_name(text: str) -> str | None:
    """Read ``ClusterName`` from the output of ``scontrol show config``; None if it is missing."""
    found = re.search(r"^ClusterName\s*=\s*(\S+)", text, re.MULTILINE)
    return found and found[1]
