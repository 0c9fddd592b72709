"""Show the output of a run's ranks: the newest log of rank 0, of another rank,
or of all.

With -f it follows the run across restarts; Ctrl-C ends the watching, not the
run. Control characters are shown as escapes, and of a progress bar the last
state; the files in the run's folder logs/ have the raw bytes.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from hpcrun.api.log_files import last_attempt_logs, log_files, marked, require_log, up_to
from hpcrun.cli.run_arguments import add_run, find_run
from hpcrun.cli.tail import Tail
from hpcrun.config import load_resolved
from hpcrun.errors import UserError
from hpcrun.launch import jobs
from hpcrun.printing import say, say_aside
from hpcrun.run.directory import RunDirectory

_POLL = 0.3
_ASK = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="follow it as it grows")
    parser.add_argument("--rank", default="0", metavar="K", help="a rank, or all (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Print the log, and follow it where wanted."""
    rank = _rank(arguments.rank)
    directory = find_run(arguments)
    _require_log(directory, rank, arguments.follow)
    try:
        _print_lines(directory, rank, arguments.follow)
    except KeyboardInterrupt:
        if jobs.state(directory).live:
            say_aside(f"hpcrun: {directory.name} runs on")
        return 130
    return 0


def _print_lines(directory: RunDirectory, rank: int | None, follow: bool) -> None:
    tails: dict[Path, Tail] = {}
    asked = time.monotonic()
    live = follow and jobs.state(directory).live
    while True:
        read = Tail.read if live else Tail.last
        say(*_new_lines(directory, rank, tails, read))
        if not live:
            return
        time.sleep(_POLL)
        if time.monotonic() - asked > _ASK:
            asked, live = time.monotonic(), jobs.state(directory).live


def _rank(text: str) -> int | None:
    if text == "all":
        return None
    if not (text.isascii() and text.isdigit()):
        raise UserError(f"--rank {text}: give the number of a rank, or all")
    return int(text)


def _require_log(run: RunDirectory, rank: int | None, following: bool) -> None:
    if following and jobs.state(run).live:
        ranks = load_resolved(run.config).job.world_size
        if rank is not None and rank >= ranks:
            raise UserError(f"--rank {rank}: {run.name} has {up_to(ranks)}")
        return
    require_log(run, rank)


def _new_lines(
    run: RunDirectory,
    rank: int | None,
    tails: dict[Path, Tail],
    read: Callable[[Tail], Iterator[bytes]],
) -> Iterator[str]:
    folder = last_attempt_logs(run)
    if folder is None:
        return
    for path in log_files(folder, rank):
        tail = tails.setdefault(path, Tail(path))
        yield from marked(path, read(tail), rank)
