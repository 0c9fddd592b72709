"""What a run's ranks print: the newest attempt's log of rank 0, or of another, or of all.

With -f it follows the run across restarts; Ctrl-C ends the watching, not the run.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from hpcrun.cli.outcome import last_attempt_logs
from hpcrun.cli.runs import add_run, find_run
from hpcrun.cli.tail import Tail
from hpcrun.errors import UserError
from hpcrun.launch import jobs
from hpcrun.run.directory import RunDirectory

_POLL = 0.3
_ASK = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    add_run(parser)
    parser.add_argument("-f", "--follow", action="store_true", help="go on as it grows")
    parser.add_argument("--rank", default="0", metavar="K", help="a rank, or all (default: 0)")


def run(arguments: argparse.Namespace) -> int:
    """Print the log, and follow it where wanted."""
    directory = find_run(arguments)
    rank = _rank(arguments.rank)
    folder = last_attempt_logs(directory)
    if folder is None and not arguments.follow:
        raise UserError(f"{directory.name}: has no log yet ({jobs.state(directory).word}); try -f")
    if folder is not None:
        _require_log(folder, rank, arguments.follow)
    tails: dict[Path, Tail] = {}
    asked = time.monotonic()
    live = arguments.follow and jobs.state(directory).live
    while True:
        for line in _new_lines(directory, rank, tails):
            print(line)
        sys.stdout.flush()
        if not live:
            return 0
        time.sleep(_POLL)
        if time.monotonic() - asked > _ASK:
            asked, live = time.monotonic(), jobs.state(directory).live


def _rank(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        raise UserError(f"--rank {text}: give a rank's number, or all")
    return int(text)


def _require_log(folder: Path, rank: int | None, following: bool) -> None:
    pattern = "rank-*.log" if rank is None else f"rank-{rank:05d}.log"
    if following or any(folder.glob(pattern)):
        return
    ranks = len(list(folder.glob("rank-*.log")))
    raise UserError(f"{folder}: has no log of rank {rank}; there are {ranks} ranks, from 0")


def _new_lines(run: RunDirectory, rank: int | None, tails: dict[Path, Tail]) -> Iterator[str]:
    folder = last_attempt_logs(run)
    if folder is None:
        return
    pattern = "rank-*.log" if rank is None else f"rank-{rank:05d}.log"
    for path in sorted(folder.glob(pattern)):
        tail = tails.setdefault(path, Tail(path))
        for line in tail.read():
            text = line.decode(errors="replace")
            yield f"{path.stem}: {text}" if rank is None else text
