"""Read every byte of a run's checkpoints and compare it with the manifest.

Exit code 1: damage.
"""

import argparse
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from hpcrun.cli.arguments import add_saved, find_saved
from hpcrun.printing import BAR_DELAY, Progress, progress_bar, say
from hpcrun.storage.counter import ByteCounter
from hpcrun.storage.errors import CheckpointError, amount
from hpcrun.storage.manifest import FileRecord, Manifest
from hpcrun.storage.store import CheckpointStore


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_saved(parser)
    parser.add_argument("--step", type=int, help="only this checkpoint (default: all)")
    parser.add_argument("--json", action="store_true", help="print one JSON object per checkpoint")


def run(arguments: argparse.Namespace) -> int:
    """Check each checkpoint and print the outcome; return 1 if a checkpoint is damaged."""
    store, _ = find_saved(arguments, "verify-0")
    steps = store.steps()
    if arguments.step is not None:
        if arguments.step not in steps:
            known = ", ".join(map(str, steps)) or "none"
            raise CheckpointError(
                f"step {arguments.step}: there is no such checkpoint; available: {known}"
            )
        steps = [arguments.step]
    if not steps:
        quarantined = ", ".join(store.quarantined())
        found = f"; in quarantine as damaged: {quarantined}" if quarantined else " yet"
        raise CheckpointError(f"{store.root}: there is no checkpoint{found}")
    store.require_private(steps)

    def report(step: int, trouble: str | None, size: int) -> None:
        if arguments.json:
            bar.say(
                json.dumps({"step": step, "complete": not trouble, "bytes": size, "why": trouble})
            )
        elif trouble is None:
            bar.say(f"step {step}: complete ({amount(size)})")
        else:
            for line in trouble.splitlines():
                bar.say(f"step {step}: DAMAGED: {line}")

    with progress_bar("B", text="verify", delay=BAR_DELAY) as bar:
        damaged = verify(store, steps, report, bar.move)
    if not arguments.json and arguments.step is None:
        for name in store.quarantined():
            say(f"{name}: damaged, in quarantine: no resume reads this folder; you may delete it")
    return int(bool(damaged))


def verify(
    store: CheckpointStore,
    steps: Iterable[int],
    report: Callable[[int, str | None, int], None],
    progress: Progress = lambda *_: None,
) -> list[int]:
    """Read and check all files of ``steps``, except steps that a training removes during the check.

    Args:
        report: called for each step with its problems (a line per damaged file) or None, and its size in
            bytes.
        progress: called with the bytes that were read, and the bytes of all steps.

    Returns:
        The damaged steps; raises CheckpointError if the training has removed all ``steps``.
    """
    damaged, checked = [], False
    manifests = {step: _manifest(store, step) for step in steps}
    sizes = [found.size for found in manifests.values() if isinstance(found, Manifest)]
    counter = ByteCounter(progress, sum(sizes))
    # Disks are faster with several reads.
    readers = max(4, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(readers, thread_name_prefix="verify") as pool, counter:
        for step, manifest in manifests.items():
            size, troubles = 0, []
            if isinstance(manifest, CheckpointError):
                troubles = [str(manifest)]
            else:
                size = manifest.size
                found = pool.map(
                    lambda record, step=step: _check(store, step, record, counter.add),
                    manifest.files,
                )
                troubles = [text for text in found if text]
            if troubles and step not in store.steps():
                continue
            if troubles:
                damaged.append(step)
            checked = True
            report(step, "\n".join(troubles) or None, size)
    if not checked:
        raise CheckpointError(f"{store.root}: the training removed the step; try again")
    return damaged


def _manifest(store: CheckpointStore, step: int) -> Manifest | CheckpointError:
    try:
        return store.manifest(step)
    except CheckpointError as error:
        return error


def _check(
    store: CheckpointStore, step: int, record: FileRecord, read: Callable[[int], None]
) -> str | None:
    # The record, not the name: by name, the manifest would be read again for each file.
    try:
        store.check_file(step, record, read)
    except CheckpointError as error:
        return str(error)
    return None
