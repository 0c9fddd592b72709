"""Check the node's own disk for data, $SCRATCH: ``job.node_checks: [scratch]``."""

import os
import shutil
from collections.abc import Iterator

from hpcrun.ports import Answer, Needs, node_check

_ENOUGH = 10**9


@node_check(seconds=20, hardware=True)
def scratch(_needs: Needs) -> Iterator[Answer]:
    """Say if $SCRATCH is there, and has a gigabyte free."""
    folder = os.environ.get("SCRATCH", "")
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        yield Answer(
            "fail", f"$SCRATCH={folder}: {error.strerror}", "mount the disk, or set SCRATCH"
        )
        return
    status = "pass" if free >= _ENOUGH else "warn"
    yield Answer(status, f"{free / 1e9:.0f} GB free in {folder}", "delete files of other jobs")
