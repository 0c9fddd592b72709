"""A forked rank is like a fresh process, and its task, its server and itself end together."""

import contextlib
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hpcrun.ranks.fork_messages import (
    FORK_SERVER,
    Inbox,
    connect,
    fork_server_command,
    listen,
    own_address,
    send,
)

PROGRAM = str(Path(__file__).with_name("forked_rank.py"))
RANK = ("-u", PROGRAM)
NAME = f"test-{os.getpid()}"
ROOT = Path(__file__).parents[2]
STARTED: "list[subprocess.Popen[str]]" = []


@pytest.fixture(autouse=True)
def no_task_left() -> Iterator[None]:
    """Kill what a failed test leaves."""
    yield
    while STARTED:
        STARTED.pop().kill()


def variables(name: str = NAME, **more: str) -> dict[str, str]:
    # pytest changes this variable, which no rank of a job has.
    own = {key: text for key, text in os.environ.items() if key != "PYTEST_CURRENT_TEST"}
    return {**own, "PYTHONPATH": str(ROOT), FORK_SERVER: name, **more}


def start(*words: str, name: str = NAME, **options: Any) -> "subprocess.Popen[str]":
    """Start a task as a launcher does."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    given = {"env": variables(name), "cwd": ROOT, "text": True, **pipes, **options}
    STARTED.append(subprocess.Popen([sys.executable, *RANK, *words], **given))
    return STARTED[-1]


def facts(name: str = NAME, **options: Any) -> tuple[dict[str, Any], str]:
    """Return the state of a rank, and what its task printed on standard error."""
    out, errors = start("facts", name=name, **options).communicate()
    assert out, errors
    return json.loads(out), errors


@contextlib.contextmanager
def serving(name: str, *more: str, env: dict[str, str] | None = None) -> Iterator[Any]:
    """Start a server of this node; with ``more`` it needs no rank to begin."""
    command = fork_server_command(
        name, parent=os.getpid(), threads=more[0] if more else None, rank=RANK
    )
    with subprocess.Popen(
        command, env=env or variables(name), cwd=ROOT, stderr=subprocess.PIPE
    ) as server:
        try:
            yield server
        finally:
            server.kill()


def until(condition: Callable[[], bool]) -> None:
    """Wait for ``condition``; pytest's own limit ends a test that waits forever."""
    while not condition():
        time.sleep(0.01)


def answers(name: str) -> bool:
    """Return True once the server can fork ranks."""
    with contextlib.suppress(OSError), connect(own_address(name), 1.0):
        return True
    return False


def ended(*processes: int) -> bool:
    found = (psutil.Process(number) for number in processes if psutil.pid_exists(number))
    with contextlib.suppress(psutil.NoSuchProcess):
        return all(process.status() == psutil.STATUS_ZOMBIE for process in found)
    return False


@pytest.fixture(scope="module")
def server() -> Iterator["subprocess.Popen[bytes]"]:
    with serving(NAME, "1") as process:
        until(lambda: answers(NAME))
        yield process


def changed_state() -> None:
    """Give a task another umask, limit, CPU and ignored signal than the server has."""
    os.umask(0o027)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard - 1))
    os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])


def test_a_forked_rank_has_the_state_of_its_task(server: object, tmp_path: Path) -> None:
    (tmp_path / "input").write_text("given")
    found = []
    for name in ("absent", NAME):
        with (tmp_path / "input").open() as text:
            env = variables(name, HPCRUN_IN_PLACE="1", TMPDIR=str(tmp_path))
            found.append(facts(stdin=text, preexec_fn=changed_state, env=env)[0])
    fresh, forked = found
    assert (fresh["forked"], forked["forked"]) == (False, True)
    assert fresh["same"]["environ"].pop(FORK_SERVER) != forked["same"]["environ"].pop(FORK_SERVER)
    for key, value in fresh["same"].items():
        assert forked["same"][key] == value, key
    assert forked["same"]["environ"]["SET_AT_IMPORT"] == "yes"


def test_no_two_ranks_share_a_random_name(server: object) -> None:
    first, second = facts()[0], facts()[0]
    assert first["forked"]
    assert second["forked"]
    for one, other in zip(first["own"], second["own"], strict=True):
        assert one != other


@pytest.mark.parametrize("code", [0, 1, 75, 255, -9, -6, -11, -15])
def test_the_task_ends_as_its_rank_does(server: object, code: int) -> None:
    task = start("die", str(-code)) if code < 0 else start("exit", str(code))
    assert int(task.communicate()[0]) != task.pid
    assert task.returncode == code


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        *((number, "TERMINATE") for number in (signal.SIGTERM, signal.SIGINT)),
        *((number, "WARNING") for number in (signal.SIGUSR1, signal.SIGUSR2)),
    ],
)
def test_a_signal_to_the_task_reaches_the_rank(server: object, number: int, reason: str) -> None:
    task = start("wait")
    assert task.stdout
    assert int(task.stdout.readline()) != task.pid
    task.send_signal(number)
    assert task.communicate()[0].split() == [reason]
    assert task.returncode == 0


@pytest.mark.parametrize("killed", ["task", "rank"])
def test_a_killed_task_or_rank_takes_helpers_along(server: object, killed: str) -> None:
    task = start("helper")
    assert task.stdout
    rank, helper = map(int, task.stdout.readline().split())
    os.kill(task.pid if killed == "task" else rank, signal.SIGKILL)
    assert task.wait() == -signal.SIGKILL
    if killed == "task":
        # The next rank begins only after the end of the killed one.
        assert facts()[0]["forked"]
        assert not psutil.pid_exists(rank)
    until(lambda: ended(helper))


def test_a_killed_server_takes_its_ranks_along() -> None:
    name = f"{NAME}-killed"
    with serving(name, "1") as server:
        until(lambda: answers(name))
        task = start("helper", name=name)
        assert task.stdout
        rank, helper = map(int, task.stdout.readline().split())
        server.kill()
        _, errors = task.communicate()
        assert ended(rank)
    assert task.returncode == -signal.SIGKILL
    assert f"the fork server of this node has ended, and this rank (process {rank})" in errors
    until(lambda: ended(helper))


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"env": {"LD_LIBRARY_PATH": "/other"}}, "variable LD_LIBRARY_PATH"),
        ({"env": {"OMP_NUM_THREADS": "7"}}, "variable OMP_NUM_THREADS"),
        ({"env": {"HPCRUN_TEST_THREADS": "2"}}, "2 threads"),
        ({"cwd": "/"}, "working folder"),
        ({"preexec_fn": lambda: os.nice(1)}, "nice value"),
    ],
)
def test_a_task_that_differs_becomes_a_rank_itself(
    server: object, options: dict[str, Any], word: str
) -> None:
    # Not when the file is read: imports of other tests change the variables.
    env = {"env": variables(**options["env"])} if "env" in options else {}
    found, errors = facts(**(options | env))
    assert not found["forked"]
    (line,) = errors.splitlines()
    assert line.startswith("hpcrun: this rank starts without the fork server: ")
    assert word in line


def test_a_server_without_an_offer_starts_no_rank() -> None:
    name = f"{NAME}-offered"
    with serving(name):
        until(lambda: answers(name))
        found, errors = facts(name)
        assert not found["forked"]
        assert errors == ""
        assert start("offer", name=name).wait() == 0
        # A connection now means that the template listens: the first server ended with the offer.
        until(lambda: answers(name))
        until(lambda: facts(name)[0]["forked"])


def test_a_template_yields_to_an_offer_of_other_ranks() -> None:
    name = f"{NAME}-changed"
    with serving(name, "1"):
        until(lambda: answers(name))
        other = variables(name, ANOTHER="1")
        assert not facts(env=other)[0]["forked"]
        assert start("offer", env=other).wait() == 0
        until(lambda: facts(env=other)[0]["forked"])


def test_no_rank_is_forked_from_a_process_with_threads() -> None:
    name = f"{NAME}-threads"
    with serving(name, "1", env=variables(name, THREAD_AT_IMPORT="1")) as server:
        _, errors = server.communicate()
    assert server.returncode == 1
    assert b"cannot fork ranks: it has 2 threads" in errors


@pytest.mark.parametrize("threads", [None, "1"])
def test_a_server_ends_with_its_parent(threads: str | None) -> None:
    name = f"{NAME}-parent-{threads}"
    command = fork_server_command(name, parent=os.getpid(), threads=threads, rank=RANK)
    code = (
        "import os, subprocess, sys;"
        f"words = {command!r};"
        f"words[words.index('--parent={os.getpid()}')] = '--parent=' + str(os.getpid());"
        "print(subprocess.Popen(words).pid, flush=True);"
        "sys.stdin.read()"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=variables(name), cwd=ROOT,
    )  # fmt: skip
    assert parent.stdout
    server = int(parent.stdout.readline())
    until(lambda: answers(name))
    parent.kill()
    parent.wait()
    until(lambda: ended(server))


def test_a_task_ends_beside_ranks_that_do_not_end(tmp_path: Path) -> None:
    """A rank beside a rank of an earlier attempt would share its GPU, and both would write."""
    name = f"{NAME}-silent"
    code = (
        "from hpcrun.ranks import fork_client; fork_client._PATIENCE = 0.2; "
        "fork_client.become_forked(); print('trains')"
    )
    # This server accepts, and answers as little as one whose killed rank still holds its GPU. It gets
    # the output of the task: a pipe would not end.
    with listen(own_address(name)), (tmp_path / "log").open("w") as log:
        task = subprocess.Popen(
            [sys.executable, "-c", code], env=variables(name), cwd=ROOT, stdout=log, stderr=log
        )
        assert task.wait() == 1
    said = (tmp_path / "log").read_text()
    assert said == "hpcrun: ranks of an earlier attempt on this node do not end\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_gets_no_answer(server: object) -> None:
    child = os.fork()
    if child == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.connect(own_address(NAME))
            closed = stranger.recv(1) == b""
        try:
            connect(own_address(NAME), 5.0)
        except PermissionError:
            os._exit(0 if closed else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_two_messages_that_arrive_together_are_both_read() -> None:
    here, there = socket.socketpair()
    with here, there:
        send(there, {"process": 1})
        send(there, {"status": 0})
        there.close()
        inbox = Inbox(here)
        assert [inbox.wait(), inbox.wait()] == [{"process": 1}, {"status": 0}]
        with pytest.raises(EOFError):
            inbox.wait()
