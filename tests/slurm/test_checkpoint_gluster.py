"""Checkpoints on a network file system of several hosts: its server goes away, two incarnations write."""

import os
import sys
import time
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
        unavailable(reason)
    name = f"gluster-{os.getpid()}"
    try:
        yield cluster.start(name, **spec)
    finally:
        cluster.stop(name)


def saves(gluster, host, folder, *arguments):
    """Start ``tests/checkpoint/saves.py`` on a host, as root, who can read any checkout."""
    command = [sys.executable, "-m", "tests.checkpoint.saves", str(gluster.shared / folder)]
    return gluster.popen([*command, *map(str, arguments)], host=host, user="root", cwd=ROOT)


def check(gluster, host, folder):
    process = saves(gluster, host, folder)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err
    return [int(step) for step in out.split()[1:]]


def test_a_server_that_stops_in_the_middle_of_a_save_costs_that_save_and_no_other(gluster):
    writer = saves(gluster, "node1", "stopped", "7-0", 1, 60, 0.2)
    lines = [writer.stdout.readline() for _ in range(3)]
    assert lines == ["saved 1\n", "saved 2\n", "saved 3\n"], writer.stderr.read()
    time.sleep(0.15)
    gluster.stop_daemon("glusterfsd")
    while not (line := writer.stdout.readline()).startswith("failed"):
        lines.append(line)
        assert line.startswith("saved"), writer.stderr.read()
    told = line
    gluster.start_daemon("glusterfsd")
    while not (line := writer.stdout.readline()).startswith("saved"):
        assert line.startswith("failed"), writer.stderr.read()
    lines += [line, writer.stdout.readline()]
    writer.terminate()
    writer.communicate(timeout=60)
    announced = [int(line.split()[1]) for line in lines if line.startswith("saved")]
    print(f"the server's absence was told: {told.strip()}; saved {announced}")
    found = check(gluster, "node2", "stopped")
    assert set(announced) <= set(found)


def test_two_incarnations_that_write_at_once_on_two_hosts_leave_only_whole_checkpoints(gluster):
    both = [
        saves(gluster, host, "both", owner, 1, 12, 0.0)
        for host, owner in (("node1", "7-0"), ("node2", "7-1"))
    ]
    ends = [process.communicate(timeout=240) for process in both]
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
