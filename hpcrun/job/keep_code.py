"""Run a launcher's module, and exit with 75 if its ranks did: the launcher itself would exit with 1.

The launcher's Python may lack hpcrun, so this file is run by its path and imports the standard library only.
"""

import os
import runpy
import subprocess
import sys
from pathlib import Path

UNFINISHED = 75


def asks_to_continue(error: BaseException) -> bool:
    """Return True if a launcher raised ``error`` because its ranks ended with 75.

    The error is torch's ChildFailedError, or for a single rank of Accelerate a CalledProcessError.
    The first rank to end decides: torchrun ends the other ranks of its node after that.
    """
    if isinstance(error, subprocess.CalledProcessError):
        return error.returncode == UNFINISHED
    failures = getattr(error, "failures", None)
    if not isinstance(failures, dict) or not failures:
        return False
    first = min(failures.values(), key=lambda failure: failure.timestamp)
    return bool(first.exitcode == UNFINISHED)


def main() -> None:
    """Run the module in the first argument, as ``python -m`` does."""
    module = sys.argv.pop(1)
    if sys.path and sys.path[0] == str(Path(__file__).parent):
        sys.path[0] = os.getcwd()  # noqa: PTH109
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except Exception as error:
        if not asks_to_continue(error):
            raise
        sys.exit(UNFINISHED)


if __name__ == "__main__":
    main()
