"""Where the ranks of an attempt meet: rank 0 publishes the port that it has really bound.

A port computed from the job id alone collides with other jobs and with ephemeral ports (enroot #243);
publishing the bound one leaves no race.
"""

import time
from pathlib import Path

from hpcrun.run.directory import RunDirectory, RunError
from hpcrun.run.events import Attempt
from hpcrun.run.files import read_json, write_json


def publish_master(run: RunDirectory, attempt: Attempt, address: str, port: int) -> None:
    """Say where rank 0 listens (host name or address, TCP port); raises OSError if it cannot be written."""
    path = _path(run, attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, {"address": address, "port": port})


def wait_for_master(run: RunDirectory, attempt: Attempt, timeout: float) -> tuple[str, int]:
    """The (address, port) that rank 0 published; waits up to ``timeout`` seconds.

    NFS may show a new file late (attribute cache, nfs(5): up to 60 s), so absence proves nothing early.

    Raises:
        RunError: nothing was published in time.
    """
    path = _path(run, attempt)
    deadline = time.monotonic() + timeout
    while True:
        published = read_json(path)
        if published is not None:
            return str(published["address"]), int(published["port"])
        if time.monotonic() > deadline:
            raise RunError(
                f"{path}: rank 0 published no address within {timeout:.0f} s; look at its log, and at "
                "whether all nodes see this folder"
            )
        time.sleep(0.05)


def _path(run: RunDirectory, attempt: Attempt) -> Path:
    return run.attempt_logs(attempt.job, attempt.restart) / "master.json"
