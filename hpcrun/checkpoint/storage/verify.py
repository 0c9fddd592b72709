"""Verification of committed checkpoints against their manifests, several files in parallel, without torch."""

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from hpcrun.checkpoint.storage.errors import CheckpointError, DamagedCheckpoint
from hpcrun.checkpoint.storage.leases import hold
from hpcrun.checkpoint.storage.manifest import FileRecord
from hpcrun.checkpoint.storage.store import CheckpointStore


def verify(
    store: CheckpointStore,
    steps: Iterable[int],
    report: Callable[[int, str | None, int], None],
    *,
    at_once: int | None = None,
) -> list[int]:
    """Read and check all files of ``steps``; a lease protects each step from pruning.

    Args:
        report: called for each step with its problems (a line per damaged file) or None, and its size in
            bytes.
        at_once: number of files to read in parallel; None: one per core, and at least four, because disks
            are faster with several reads.

    Returns:
        The damaged steps.
    """
    damaged = []
    readers = at_once or max(4, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(readers, thread_name_prefix="verify") as pool:
        for step in steps:
            with hold(store.root, step):
                size, troubles = 0, []
                try:
                    manifest = store.manifest(step)
                except DamagedCheckpoint as error:
                    troubles = [str(error)]
                else:
                    size = manifest.size
                    found = pool.map(
                        lambda record, step=step: _check(store, step, record), manifest.files
                    )
                    troubles = [text for text in found if text]
            if troubles:
                damaged.append(step)
            report(step, "\n".join(troubles) or None, size)
    return damaged


def _check(store: CheckpointStore, step: int, record: FileRecord) -> str | None:
    # The record, not the name: by name, the manifest would be read again for each file.
    try:
        store.check_file(step, record)
    except CheckpointError as error:
        return str(error)
    return None
