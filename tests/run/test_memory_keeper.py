"""The keeper of a job's memory: it holds two snapshots of a run, and ends with its parent."""

import contextlib
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from hpcrun.run.memory_keeper import KeeperClient, MemoryFile, new_file, new_key, start

KIND = socket.SOCK_SEQPACKET
STARTER = """
import sys
from hpcrun.run.memory_keeper import start
print(start(sys.argv[1]).pid, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def client():
    """Return the client of a new keeper."""
    key = new_key()
    process = start(key)
    yield KeeperClient(key, "/runs/a")
    process.kill()
    process.communicate()


def put(client, step, snapshot, name, content=b"content"):
    """Put a file, and return its entry."""
    file = MemoryFile(step, snapshot, name, len(content))
    descriptor = new_file(name)
    os.write(descriptor, content)
    client.put(file, descriptor)
    os.close(descriptor)
    return file


def names(client):
    return [file.name for file in client.files()]


def test_a_file_outlives_the_process_that_made_it(client):
    file = put(client, 1, "a", "one")
    for _ in range(2):
        descriptor = client.open(file)
        assert os.pread(descriptor, 100, 0) == b"content"
        os.close(descriptor)
    assert client.files() == [file]


def test_a_keeper_holds_the_chosen_and_the_newest_snapshot(client):
    put(client, 1, "a", "a1")
    put(client, 1, "a", "a2")
    client.only("a")
    put(client, 2, "b", "b1")
    assert names(client) == ["a1", "a2", "b1"]
    put(client, 3, "c", "c1")
    assert names(client) == ["a1", "a2", "c1"]
    client.only("c")
    assert names(client) == ["c1"]
    client.only()
    assert names(client) == []


def test_the_runs_of_a_job_do_not_see_each_other(client):
    put(client, 1, "a", "one")
    other = KeeperClient(client.key, "/runs/b")
    assert names(other) == []
    put(other, 1, "b", "two")
    other.only()
    assert names(client) == ["one"]


def test_a_file_that_is_not_there_is_an_error(client):
    with pytest.raises(FileNotFoundError, match="one of step 1 is not in memory"):
        client.open(MemoryFile(1, "a", "one", 7))


def test_a_keeper_of_another_key_is_not_reached(client):
    with pytest.raises(ConnectionRefusedError):
        KeeperClient(new_key(), "/runs/a").files()


def test_a_second_keeper_of_a_node_is_refused(client):
    with pytest.raises(OSError, match="in use"):
        start(client.key)


@pytest.mark.parametrize("message", [b"", b"not JSON", b"{}", b'{"run": "a", "do": "put"}'])
def test_a_broken_request_leaves_the_keeper_at_work(client, message):
    put(client, 1, "a", "one")
    with socket.socket(socket.AF_UNIX, KIND) as line:
        line.connect(address_of(client))
        line.send(message)
        line.recv(1000)
    assert names(client) == ["one"]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a second user")
def test_a_process_of_another_user_gets_no_answer(client):
    put(client, 1, "a", "one")
    address, child = address_of(client), os.fork()
    if child == 0:
        code = 2
        with contextlib.suppress(BaseException), socket.socket(socket.AF_UNIX, KIND) as line:
            os.setuid(65534)
            line.connect(address)
            with contextlib.suppress(OSError):
                line.send(b'{"run": "/runs/a", "do": "list"}')
            code = 0 if answer_of(line) == b"" else 1
        os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert names(client) == ["one"]


def answer_of(line):
    try:
        return line.recv(1000)
    except ConnectionResetError:
        return b""


def address_of(client):
    """Return the only abstract address of the keeper's process, from the kernel's list."""
    client.files()
    # A connection that ends has the address too.
    (address,) = {
        each.laddr
        for process in psutil.Process().children()
        for each in process.net_connections(kind="unix")
        if str(each.laddr).startswith("@hpcrun-")
    }
    return "\0" + address[1:]


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_keeper_ends_with_its_parent(end):
    key = new_key()
    parent = subprocess.Popen(
        [sys.executable, "-c", STARTER, key], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    keeper = psutil.Process(int(parent.stdout.readline()))
    client = KeeperClient(key, "/runs/a")
    file = put(client, 1, "a", "one", bytes(1 << 20))
    held = held_by(keeper, file).stat()
    assert (held.st_size, held.st_nlink) == (1 << 20, 0)
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT):
        keeper.send_signal(number)
    assert client.files() == [file]
    parent.send_signal(end)
    parent.communicate()
    psutil.wait_procs([keeper])
    # Nothing has the file open any more, and it never had a path.
    with pytest.raises(ConnectionRefusedError):
        client.files()


def held_by(process, file):
    """Return the descriptor in /proc under which ``process`` holds a file without a path."""
    name = Path(f"/memfd:hpcrun {file.name} (deleted)")
    (found,) = (
        each for each in Path(f"/proc/{process.pid}/fd").iterdir() if each.readlink() == name
    )
    return found
