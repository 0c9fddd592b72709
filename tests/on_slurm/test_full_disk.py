"""A file system with the run directory and Slurm's log is full while the batch step classifies the end."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from tests.support import jobs

from .cluster import PATIENCE, SlurmCluster
from .separate_cluster import running
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture
def small(slurm: SlurmCluster) -> Iterator[Path]:
    """A file system of 64 MiB for the job user, shared by hosts that start later."""
    folder = Path(tempfile.mkdtemp(prefix="hpcrun-full-", dir="/tmp"))
    user = slurm.shared.stat()
    options = f"size=64m,mode=755,uid={user.st_uid},gid={user.st_gid}"
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)
        folder.rmdir()


@pytest.fixture
def site(small: Path) -> Iterator[SlurmCluster]:
    """Two nodes with the small file system mounted."""
    yield from running("full", nodes=2)


def fill(path: Path) -> None:
    """Append empty lines to a file until the file system and the file's last block are full."""
    with path.open("ab", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while file.write(b"\n" * size):
                    pass
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise


def test_a_full_disk_ends_the_job_and_resume_works(
    site: SlurmCluster, small: Path, calm: RunDirectory
) -> None:
    bench = Bench(site)
    bench.hpcrun(*bench.arguments("full", f"--runs-dir={small}", model__pause=0.05))
    run = RunDirectory(small / "full")
    job = bench.job(run)
    with bench.held_at(run, 14):
        (victim,) = bench.pids(run, 1)
        for path in (small / "filler", run.events, run.logs / f"batch-{job}.log"):
            fill(path)
        os.kill(victim, signal.SIGKILL)
    assert bench.wait_for_end(run) == "FAILED", bench.story(run)
    assert (bench.causes(run), site.restarts(job)) == ([], 0)
    (small / "filler").unlink()
    bench.hpcrun("resume", f"--runs-dir={small}", "full", "--detach")
    bench.wait_until(lambda: bench.job(run) != job, PATIENCE, lambda: bench.story(run))
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    # The second job has recorded the end of the first.
    assert len(bench.causes(run)) == 2
    assert bench.causes(run)[-1] == "finished"
    assert jobs.final_state(run) == jobs.final_state(calm)
