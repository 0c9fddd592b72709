"""The shell in which a job's set-up lines run before its ranks start.

The lines, their limits (`ulimit`), folder (`cd`) and variables reach srun and the ranks, and no other
process: the process that classifies the end keeps the environment from sbatch.
"""

import fcntl
import os
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcrun.slurm.environment import export_from_environment

_READY = b"ready"
# The user's set-up lines are unlikely to use this number.
_FIRST_DESCRIPTOR = 200
# A write of this size to a pipe is atomic (POSIX, PIPE_BUF).
_LONGEST = 3000


@dataclass(frozen=True)
class Ended:
    """The exit code of the shell, and the command that failed before srun started, if any.

    ``out_of_time``: the ranks were killed because of the time limit.
    """

    code: int
    failed: str | None
    out_of_time: bool = False


def run_ranks(
    setup: Sequence[str],
    env: Mapping[str, str],
    steps: Sequence[Sequence[str]],
    environ: Mapping[str, str],
) -> Ended:
    """Run ``setup``, set ``env``, and run ``steps`` one after the other, up to the first that fails.

    Slurm signals every process of the batch script itself, so no signal is passed on.

    Args:
        setup: shell lines; after a line that fails, no step starts.
        env: variables for the ranks only.
        steps: the srun commands; the last starts the ranks.
        environ: the environment of the first line.

    Raises:
        OSError: bash cannot be started.
    """
    reading, writing = os.pipe()
    report = fcntl.fcntl(writing, fcntl.F_DUPFD, _FIRST_DESCRIPTOR)
    os.close(writing)
    os.set_blocking(reading, False)
    try:
        exports, values = export_from_environment(env)
        script = shell_script(setup, exports, steps, report)
        child = subprocess.Popen(
            ["bash", "-c", script, "hpcrun"], env={**environ, **values}, pass_fds=[report]
        )
        os.close(report)
        report = -1
        code = child.wait()
        try:
            words = os.read(reading, 2 * _LONGEST)
        except BlockingIOError:
            # A background process of the set-up may keep the other end open.
            words = b""
    finally:
        os.close(reading)
        if report >= 0:
            os.close(report)
    code = code if code >= 0 else 128 - code
    if words.startswith(_READY):
        return Ended(code, None)
    number, _, command = words.decode(errors="replace").partition(" ")
    if not number.isdecimal():
        return Ended(code, "job.setup")
    return Ended(int(number), command)


def shell_script(
    setup: Sequence[str], exports: Sequence[str], steps: Sequence[Sequence[str]], report: int
) -> str:
    """Return the text for bash, which writes the failed line or "ready" to descriptor ``report``."""
    return "\n".join(
        [
            "set -e",
            f'hpcrun_failed() {{ printf "%s %s" "$1" "${{2:0:{_LONGEST}}}" >&{report}; exit "$1"; }}',
            'trap \'hpcrun_failed "$?" "$BASH_COMMAND"\' EXIT',
            *setup,
            *exports,
            # Only here: module and conda read variables that are not set.
            "set -u",
            # Not a trap that the set-up has made its own.
            'case "$(trap -p EXIT)" in *hpcrun_failed*) trap - EXIT ;; esac',
            # Slurm signals this shell too: with a trap it outlives srun.
            "trap : TERM USR1 USR2",
            f"printf {_READY.decode()} >&{report}",
            f"exec {report}>&-",
            "code=0",
            f"{' && '.join(shlex.join(step) for step in steps)} || code=$?",
            "exit $code",
        ]
    )
