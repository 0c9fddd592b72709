"""The Python stacks of a script, which py-spy reads from outside the script's processes."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import psutil

from hpcrun.lifecycle.rank.stack_writer import StackError
from hpcrun.run.endings import node_name
from hpcrun.run.stacks import Frame, Stack, Thread

_PATIENCE = 20.0
_MOST_PROCESSES = 16
_LAUNCHERS = {
    "torch.distributed.run",
    "torchrun",
    "accelerate",
    "conda",
    "torch.distributed.launch",
}
_NO_PROGRAM = (
    "a script's stacks need py-spy, which is not installed for the job; install it with "
    "`pip install py-spy` in the job's environment"
)


def script_stacks(pid: int) -> tuple[Stack, ...]:
    """Return the stacks of the script that is process ``pid``, or of the ranks that ``pid`` has started.

    For each RANK, the outermost process that is not a launcher is taken. Processes that a program
    has forked, such as the workers of a DataLoader, are skipped.

    Raises:
        StackError: py-spy is not installed, or may not read the processes.
    """
    program = _program()
    found: dict[int | None, Stack] = {}
    words = "it has ended"
    for process in _programs(pid)[:_MOST_PROCESSES]:
        try:
            printed = _dump(program, process.pid)
        except StackError as error:
            words = str(error)
            continue
        rank = None if _is_launcher(process) else _rank_of(process)
        found.setdefault(rank, Stack(rank, node_name(), process.pid, parse_dump(printed)))
    if not found:
        raise StackError(f"py-spy does not read process {pid}: {words}")
    ranks = tuple(one for rank, one in sorted(found.items(), key=_by_rank) if rank is not None)
    return ranks or tuple(found.values())


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
            if commands[child.pid] != commands.get(child.ppid()):
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


def _rank_of(process: psutil.Process) -> int | None:
    try:
        word = process.environ().get("RANK", "")
    except psutil.Error:
        return None
    return int(word) if word.isdigit() else None
