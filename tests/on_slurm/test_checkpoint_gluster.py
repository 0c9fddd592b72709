"""Checkpoints on a network file system of several hosts: the server stops, two attempts write.

The tests of tests/checkpoint also run on the mount. One of them fills a separate disk. The slow
power-loss tests need a separate ext4, which a loop device makes on the machine's disk.
"""

import os
import sys
from pathlib import Path

import pytest

from . import cluster
from .conftest import unavailable

ROOT = Path(__file__).parents[2]
pytestmark = [pytest.mark.slurm, pytest.mark.slow]


@pytest.fixture(scope="module")
def gluster():
    """Two hosts with one GlusterFS mounted on each."""
    spec = {"nodes": 2, "shared_fs": "gluster"}
    if (reason := cluster.why_not(cluster.ClusterSpec(**spec))) is not None:
        unavailable(reason, features=["gluster"])
    name = f"gluster-{os.getpid()}"
    try:
        yield cluster.start(name, **spec)
    finally:
        cluster.stop(name)


def saves(gluster, host, folder, *arguments):
    """Start ``tests/checkpoint/saves.py`` on a host as root, who can read any checkout."""
    command = [sys.executable, "-m", "tests.checkpoint.saves", str(gluster.shared / folder)]
    return gluster.popen([*command, *map(str, arguments)], host=host, user="root", cwd=ROOT)


def check(gluster, host, folder):
    process = saves(gluster, host, folder)
    out, err = process.communicate(timeout=cluster.PATIENCE)
    assert process.returncode == 0, err
    return [int(step) for step in out.split()[1:]]


def test_the_suite_of_the_local_disk_passes_on_the_mount(gluster):
    folder = gluster.shared / "suite"
    done = gluster.run(
        [
            *(sys.executable, "-m", "pytest", "tests/checkpoint", "-m", "not slow"),
            *(f"--basetemp={folder}", "-p", "no:cacheprovider"),
        ],
        host="node1", user="root", cwd=ROOT, timeout=900, check=False,
    )  # fmt: skip
    told = done.stdout.strip().splitlines()[-1]
    print(told)
    assert done.returncode == 0, done.stdout
    assert "skipped" not in told
    # The folder of the tests, as the other host sees it.
    left = gluster.run(["find", str(folder), "-name", "manifest.json"], host="node2", user="root")
    assert len(left.stdout.splitlines()) > 20


def test_a_stopped_server_fails_only_the_current_save(gluster):
    writer = saves(gluster, "node1", "stopped", "7-0", 1, 200, 0.05)
    lines = []

    def read_until(word):
        while not lines or not lines[-1].startswith(word):
            lines.append(writer.stdout.readline())
            assert lines[-1], writer.stderr.read()
        return lines[-1].strip()

    read_until("writing 3")
    gluster.stop_daemon("glusterfsd")
    told = read_until("failed")
    assert told.startswith("failed 3: ")
    assert (
        "rank-00000.bin: cannot be written: Transport endpoint is not connected (ENOTCONN)" in told
    )
    gluster.start_daemon("glusterfsd")
    read_until("saved")
    read_until("writing")
    read_until("saved")
    writer.terminate()
    writer.communicate(timeout=cluster.PATIENCE)
    announced = [int(line.split()[1]) for line in lines if line.startswith("saved")]
    print(f"the server's absence was reported: {told}; saved {announced}")
    assert announced[:2] == [1, 2]
    found = check(gluster, "node2", "stopped")
    assert set(announced) <= set(found)
    names = gluster.run(["ls", str(gluster.shared / "stopped")], host="node2", user="root").stdout
    assert "step-000000003.tmp" not in names


def test_two_writing_attempts_leave_only_valid_checkpoints(gluster):
    both = [
        saves(gluster, host, "both", owner, 1, 12, 0.0)
        for host, owner in (("node1", "7-0"), ("node2", "7-1"))
    ]
    ends = [process.communicate(timeout=cluster.PATIENCE) for process in both]
    assert [process.returncode for process in both] == [0, 0], ends
    announced = {
        int(line.split()[1])
        for out, _ in ends
        for line in out.splitlines()
        if line.startswith("saved")
    }
    print([[line[:90] for line in out.splitlines()] for out, _ in ends])
    assert announced == set(range(1, 13))
    for host in ("node1", "node2"):
        assert check(gluster, host, "both") == list(range(1, 13))
