"""A line for a save that one rank has begun inside ``if rank == 0``, and that waits for the other ranks.

Saves of folders and of shards are collective: those of hpcrun, ``torch.distributed.checkpoint``, and
``save_state`` or ``save_pretrained`` of a sharded model. A rank that calls them alone waits for ever, and the
other ranks wait for this rank in the next step. A thread looks at the main thread of the program.
"""

import ast
import linecache
import re
import sys
import sysconfig
import threading
import time
from collections.abc import Iterator
from functools import lru_cache
from os import getpid
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from hpcrun.printing import say_aside

SECONDS = 60.0
"""Seconds after which a rank that waits gets the line."""
_LOOK = 5.0
_OWN = str(Path(__file__).parents[1])
_LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
)
_SAVES = re.compile(r"save|checkpoint|state_dict|full_tensor|consolidate|^close$|^finish$", re.I)
_WAITS = re.compile(
    r"torch/distributed/(?:distributed_c10d|_functional_collectives|tensor/|_composable/|fsdp/)"
)
_ONE_RANK = re.compile(
    r"rank|main_process|is_main|is_master|master_process|global_zero|is_chief", re.I
)
_watched: list[int] = []


class Wait(NamedTuple):
    """A call of a save in the code of a program, and the line of the ``if`` around it."""

    call: str
    file: str
    line: int
    test: str


def watch_saves() -> None:
    """Start the thread, once for each process."""
    if getpid() in _watched:
        return
    _watched.append(getpid())
    threading.Thread(target=_watch, name="hpcrun lone saves", daemon=True).start()


def _watch() -> None:
    main = threading.main_thread().ident
    before: tuple[int, int] | None = None
    since, told = time.monotonic(), set[tuple[str, int]]()
    while True:
        time.sleep(min(_LOOK, SECONDS / 4))
        frame = sys._current_frames().get(main or 0)
        found = None if frame is None else waiting(frame)
        if found is None:
            before = None
            continue
        wait, place = found
        if place != before:
            before, since = place, time.monotonic()
        elif time.monotonic() - since >= SECONDS and (wait.file, wait.line) not in told:
            told.add((wait.file, wait.line))
            say_aside(f"hpcrun: {_line(wait)}")
        del frame


def _line(wait: Wait) -> str:
    return (
        f"{wait.file}:{wait.line}: {wait.call}() has waited {SECONDS:.0f} s for the other ranks; all ranks "
        f"must call it, and it is inside `{wait.test}`, so the rank waits for ever if another rank does not "
        "enter; move the call out of this condition"
    )


def waiting(frame: FrameType) -> tuple[Wait, tuple[int, int]] | None:
    """Return the lone save in which a thread waits, and its place; None if it waits for something else.

    Args:
        frame: the innermost frame of the thread.
    """
    frames = list(_outward(frame))
    first = next((i for i, one in enumerate(frames) if _is_users(one)), None)
    if not first or not any(_WAITS.search(one.f_code.co_filename) for one in frames[:first]):
        return None
    called = [one.f_code.co_name for one in frames[:first]]
    call = next((name for name in reversed(called) if _SAVES.search(name)), "")
    if not call or not _SAVES.search(" ".join(called[-5:])):
        return None
    caller = frames[first]
    for one in frames[first:]:
        if _is_users(one) and (test := condition(one.f_code.co_filename, one.f_lineno)):
            wait = Wait(call, caller.f_code.co_filename, caller.f_lineno, test)
            return wait, (id(caller), caller.f_lasti)
    return None


def _outward(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    return not frame.f_code.co_filename.startswith((_OWN, *_LIBRARIES, "<"))


@lru_cache
def condition(file: str, line: int) -> str:
    """Return the ``if`` on a rank that guards a line of a file; empty without one."""
    source = linecache.getlines(file)
    try:
        tree = ast.parse("".join(source))
    except (SyntaxError, ValueError):
        return ""
    for node in ast.walk(tree):
        if not isinstance(node, ast.If) or not _ONE_RANK.search(ast.unparse(node.test)):
            continue
        if _covers(node.body, line) or _covers(node.orelse, line):
            return f"if {ast.unparse(node.test)}"
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if not isinstance(body, list) or not _covers(body, line):
            continue
        for one in body:
            # if rank != 0: return
            leaves = isinstance(one, ast.If) and isinstance(one.body[-1], ast.Return | ast.Continue)
            if leaves and one.lineno < line and _ONE_RANK.search(ast.unparse(one.test)):
                return f"if {ast.unparse(one.test)}"
    return ""


def _covers(body: list[ast.stmt], line: int) -> bool:
    return bool(body) and body[0].lineno <= line <= (body[-1].end_lineno or 0)
