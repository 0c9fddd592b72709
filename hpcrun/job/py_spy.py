"""The Python stacks of a script, which py-spy reads from outside the script's processes."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from hpcrun.ranks.stack_writer import StackError
from hpcrun.run.endings import node_name
from hpcrun.run.stacks import SPAWNED, STOPPED, Frame, Stack, Thread

_PATIENCE = 20.0
_MOST_PROCESSES = 16
_LAUNCHERS = {
    "torch.distributed.run",
    "torchrun",
    "accelerate",
    "conda",
    "torch.distributed.launch",
}
LAUNCHER = "a launcher"
_SPAWNED = ("--multiprocessing-fork",)
# Helpers of Python and torch that run no code of the program.
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "compile_worker")
_LOADER = ("torch/utils/data/dataloader.py",)
_JOINS = ("torch/multiprocessing/spawn.py", "/multiprocessing/process.py")
_NO_PROGRAM = (
    "a script's stacks need py-spy, which is not installed for the job; install it with "
    "`pip install py-spy` in the job's environment"
)


def script_stacks(pid: int) -> tuple[Stack, ...]:
    """Return the stacks of the script that is process ``pid``, or of the ranks that ``pid`` has started.

    For each RANK, the outermost process that is not a launcher is taken. Processes that multiprocessing has
    spawned follow without a number, because their environment shows no RANK of their own. The forked
    processes of a rank, such as the workers of a DataLoader, are read if the rank waits for its loader.

    Raises:
        StackError: py-spy is not installed, or may not read the processes.
    """
    program = _program()
    ranks: dict[int | None, Stack] = {}
    others: list[Stack] = []
    words = "it has ended"
    for process in _programs(pid)[:_MOST_PROCESSES]:
        role = SPAWNED if _runs(process, _SPAWNED) else LAUNCHER if _is_launcher(process) else None
        try:
            stack = _stack(program, process, None if role else _rank_of(process), role)
        except StackError as error:
            words = str(error)
            continue
        if role:
            others.append(stack)
        else:
            ranks.setdefault(stack.rank, stack)
    if not ranks and not others:
        raise StackError(f"py-spy does not read process {pid}: {words}")
    sorted_ranks = tuple(one for _, one in sorted(ranks.items(), key=_by_rank))
    found = (*with_workers(sorted_ranks), *others)
    # A program that waits for the processes that it has spawned is their launcher.
    spawning = any(stack.role == SPAWNED for stack in others)
    return tuple(
        replace(one, rank=None, role=LAUNCHER)
        if spawning and not one.role and _is_in(one, _JOINS)
        else one
        for one in found
    )


def with_workers(stacks: tuple[Stack, ...]) -> tuple[Stack, ...]:
    """Return ``stacks``, and those of the forked processes of each rank that waits for its DataLoader.

    A process that cannot be read has no threads.
    """
    return (
        *stacks,
        *(worker for one in stacks if _is_in(one, _LOADER) for worker in _workers(one)),
    )


def _workers(stack: Stack) -> list[Stack]:
    found = []
    role = f"a worker of {f'rank {stack.rank}' if stack.rank is not None else stack.pid}"
    with contextlib.suppress(psutil.Error):
        own = psutil.Process(stack.pid)
        for child in own.children():
            if child.cmdline() != own.cmdline():
                continue
            try:
                found.append(_stack(_program(), child, None, role))
            except StackError as error:
                found.append(Stack(None, node_name(), child.pid, (), doing=str(error), role=role))
    return found


def _stack(program: str, process: psutil.Process, rank: int | None, role: str | None) -> Stack:
    host, pid = node_name(), process.pid
    with contextlib.suppress(psutil.Error):
        if process.status() in (psutil.STATUS_STOPPED, psutil.STATUS_TRACING_STOP):
            return Stack(rank, host, pid, (), doing=STOPPED, role=role)
    return Stack(rank, host, pid, parse_dump(_dump(program, pid)), role=role)


def _is_in(stack: Stack, files: tuple[str, ...]) -> bool:
    frames = stack.threads[0].frames if stack.threads else ()
    return any(frame.file.endswith(files) for frame in frames)


def parse_dump(text: str) -> tuple[Thread, ...]:
    """Return the threads in the output of ``py-spy dump --json``, the main thread first.

    Raises:
        StackError: the text is not such an output.
    """
    try:
        threads = [_thread(one) for one in json.loads(text)]
    except (ValueError, KeyError, TypeError) as error:
        raise StackError(f"py-spy printed no stacks but: {text[:200]!r}") from error
    return tuple(sorted(threads, key=lambda thread: thread.name != "MainThread"))


def _thread(value: Mapping[str, Any]) -> Thread:
    frames = [Frame(one["filename"], one["line"], one["name"]) for one in value["frames"]]
    return Thread(
        value.get("thread_name") or f"thread {value['os_thread_id']}", tuple(frames[::-1])
    )


def _program() -> str:
    # A job's Python may be on no PATH; its programs are in the interpreter's folder.
    neighbor = Path(sys.executable).with_name("py-spy")
    found = str(neighbor) if os.access(neighbor, os.X_OK) else shutil.which("py-spy")
    if found is None:
        raise StackError(_NO_PROGRAM)
    return found


def _dump(program: str, pid: int) -> str:
    try:
        done = subprocess.run(
            [program, "dump", "--json", "--pid", str(pid)],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise StackError(f"no answer in {_PATIENCE:.0f} s") from None
    except OSError as error:
        raise StackError(f"{program}: {error.strerror}") from error
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        raise StackError(lines[0] if lines else f"exit code {done.returncode}")
    return done.stdout


def _programs(pid: int) -> list[psutil.Process]:
    """Return the process and its descendants, without processes that were forked without a new program."""
    try:
        root = psutil.Process(pid)
        return [root, *_started(root, root.children(recursive=True))]
    except psutil.Error:
        return []


def _started(root: psutil.Process, children: Iterable[psutil.Process]) -> list[psutil.Process]:
    commands = {root.pid: root.cmdline()}
    found = []
    for child in children:
        try:
            commands[child.pid] = child.cmdline()
            if commands[child.pid] != commands.get(child.ppid()) and not _runs(child, _HELPERS):
                found.append(child)
        except psutil.Error:
            # The process has ended.
            continue
    return found


def _by_rank(item: tuple[int | None, Stack]) -> int:
    return -1 if item[0] is None else item[0]


def _is_launcher(process: psutil.Process) -> bool:
    try:
        words = process.cmdline()
    except psutil.Error:
        return False
    return any(Path(word).name in _LAUNCHERS for word in words[:4])


def _runs(process: psutil.Process, names: Iterable[str]) -> bool:
    try:
        words = " ".join(process.cmdline())
    except psutil.Error:
        return False
    return any(name in words for name in names)


def _rank_of(process: psutil.Process) -> int | None:
    try:
        word = process.environ().get("RANK", "")
    except psutil.Error:
        return None
    return int(word) if word.isdigit() else None
