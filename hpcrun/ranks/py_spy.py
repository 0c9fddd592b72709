"""The Python stacks of a process tree, which py-spy reads from outside its processes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import psutil

from hpcrun.run.endings import node_name
from hpcrun.run.stacks import Frame, Stack, StackError, Thread

# A stopped process never answers; the command waits for 8 s.
_TIMEOUT = 5.0
_MAX_PROCESSES = 16
_LAUNCHERS = {"torch.distributed.run", "torchrun", "accelerate", "conda"}
_MISSING = (
    "these stacks need py-spy, which is not installed for the job; install it with "
    "`pip install py-spy` in the job's environment"
)


def script_stacks(pid: int) -> tuple[Stack, ...]:
    """Return the stacks of the Python processes in the tree of the script ``pid``.

    A process is a rank if it is the first with its RANK and is not a launcher. Processes that a rank has
    forked or spawned, such as the workers of a DataLoader, have no rank.

    Raises:
        StackError: py-spy is not installed, or may not read the processes.
    """
    program = _program()
    found: list[Stack] = []
    problem = "it has ended"
    for process in _tree(pid)[:_MAX_PROCESSES]:
        try:
            rank, role = _identity(process, {stack.rank for stack in found})
            threads = parse_dump(_dump(program, process.pid))
        except (StackError, psutil.Error) as error:
            problem = str(error)
            continue
        found.append(Stack(rank, node_name(), process.pid, threads, role=role))
    if not found:
        raise StackError(f"py-spy does not read process {pid}: {problem}")
    return tuple(found)


def with_workers(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """Return ``stacks`` of ranks, and those of their forked processes if py-spy is able to read them."""
    workers = []
    for stack in stacks:
        with contextlib.suppress(StackError, psutil.Error):
            program, (rank, *children) = _program(), _tree(stack.pid)
            forked = [child for child in children if child.cmdline() == rank.cmdline()]
            for child in forked[:_MAX_PROCESSES]:
                threads = parse_dump(_dump(program, child.pid))
                role = f"a worker of rank {stack.rank}"
                workers.append(Stack(None, stack.host, child.pid, threads, role=role))
    return (*stacks, *workers)


def parse_dump(text: str) -> tuple[Thread, ...]:
    """Return the threads in the output of ``py-spy dump --json``, the main thread first.

    Raises:
        StackError: the text is not such an output.
    """
    try:
        threads = [
            Thread(
                one.get("thread_name") or f"thread {one['os_thread_id']}",
                tuple(
                    Frame(frame["filename"], frame["line"], frame["name"])
                    for frame in reversed(one["frames"])
                ),
            )
            for one in json.loads(text)
        ]
    except (ValueError, KeyError, TypeError) as error:
        raise StackError(f"py-spy printed no stacks but: {text[:200]!r}") from error
    return tuple(sorted(threads, key=lambda thread: thread.name != "MainThread"))


def _program() -> str:
    # A job's Python may be on no PATH; its programs are in the interpreter's folder.
    neighbor = Path(sys.executable).with_name("py-spy")
    found = str(neighbor) if os.access(neighbor, os.X_OK) else shutil.which("py-spy")
    if found is None:
        raise StackError(_MISSING)
    return found


def _dump(program: str, pid: int) -> str:
    words = [program, "dump", "--json", "--pid", str(pid)]
    try:
        done = subprocess.run(
            words, capture_output=True, encoding="utf-8", timeout=_TIMEOUT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StackError(str(error)) from error
    if done.returncode:
        raise StackError(next(iter(done.stderr.split("\n")), f"exit code {done.returncode}"))
    return done.stdout


def _tree(pid: int) -> list[psutil.Process]:
    try:
        root = psutil.Process(pid)
        return [root, *root.children(recursive=True)]
    except psutil.Error:
        return []


def _identity(process: psutil.Process, ranks: set[int | None]) -> tuple[int | None, str | None]:
    """Return the rank of a process, or its role; raises psutil.Error if the process has ended."""
    words = process.cmdline()
    if any(Path(word).name in _LAUNCHERS for word in words[:4]):
        return None, "a launcher"
    rank = process.environ().get("RANK", "")
    if "--multiprocessing-fork" in words or (rank.isdigit() and int(rank) in ranks):
        return None, f"a child of process {process.ppid()}"
    return (int(rank), None) if rank.isdigit() else (None, None)
