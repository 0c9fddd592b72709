"""The server of tests/support/on_ranks.py: a pytest process that imports torch once and forks ranks of tests.

A plugin (``-p tests.support.rank_server``). The process collects the files with such tests, and then answers
requests from a socket, one JSON object per line. Each rank is a fork that runs one test with its fixtures.
"""

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import NoReturn

import numpy.ma  # noqa: F401, numpy.unique would import it in each rank.
import pytest
import torch
import torch._dynamo  # DDP would import it in each rank.
import torch.distributed as dist
from _pytest.runner import runtestprotocol

from hpcrun.config import resolve
from tests.support import debugger
from tests.support.training.nccl_rules import Rules, nccl_rules

resolve([])  # the config's engine makes the validators at the first use, else in each rank.

GRACE_SECONDS = 5.0
"""Time for the other ranks after a rank has failed: most of them report a lost connection."""

_LOOK_SECONDS = 0.01
_STACK_SECONDS = 10.0
_PRINT_STACK = signal.SIGRTMAX - 1
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Request:
    """A test and its ranks: the arguments of ``ranks``, and the folder that ``tmp_path`` returns.

    Without ``group``, the test runs in a process that is no rank.
    """

    file: str
    test: str
    counts: list[int]
    folder: str
    limit: float
    group: bool = True


@dataclass(frozen=True)
class Ended:
    """The end of a rank: ``passed``, ``skipped`` or ``failed``; the report, its first line, and the time."""

    outcome: str
    text: str = ""
    brief: str = ""
    time: float = 0.0

    def order(self) -> tuple[bool, bool, float]:
        """Return a key that sorts the ends: the probable cause of a failed test is first."""
        return self.outcome != "failed", "gloo" in self.brief, self.time


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rank-server", type=int, help="descriptor of the socket for requests")


def pytest_configure(config: pytest.Config) -> None:
    # The mark belongs to the plugin that `-p no:warnings` leaves out.
    config.addinivalue_line("markers", "filterwarnings(filter): has no effect here")
    config.pluginmanager.register(RankServer(config.getoption("--rank-server")))


class RankServer:
    """Plugin of the server, and in its forks the rank."""

    def __init__(self, descriptor: int) -> None:
        self._socket = socket.socket(fileno=descriptor)
        self._request: Request | None = None
        self._phase = self._rank = self._world_size = -1
        self._until_the_process_ends = contextlib.ExitStack()
        # Each rank inherits the rules, and its own record of collectives.
        self._rules: Rules = self._until_the_process_ends.enter_context(nccl_rules())
        self._reports: list[pytest.TestReport] = []
        self._debugger: debugger.RankDebugger | None = None

    @pytest.fixture
    def rank(self) -> int:
        """Return the number of this rank."""
        return self._rank

    @pytest.fixture
    def world_size(self) -> int:
        """Return the number of ranks."""
        return self._world_size

    @pytest.fixture
    def phase(self) -> int:
        """Return the number of earlier sets of ranks that have run this test."""
        return self._phase

    @pytest.fixture
    def tmp_path(self) -> Path:
        """Return the folder of the test, which all ranks share."""
        assert self._request is not None
        return Path(self._request.folder)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        """Answer requests, instead of running all tests, until the other side closes the socket."""
        items = {item.nodeid: item for item in session.items}
        # The garbage collector of a rank must not touch, and so copy, these pages.
        gc.collect()
        gc.freeze()
        with self._socket.makefile("r") as requests:
            for line in requests:
                request = Request(**json.loads(line))
                answer = self._run(items.get(request.test), request)
                self._socket.sendall(json.dumps(answer).encode() + b"\n")
        return True

    def _preload(self, item: pytest.Item) -> str | None:
        """Import what the mark ``preload`` of a test lists; return why that is impossible.

        Not when the files are collected: each server collects all files, and one of them runs the test.
        """
        mark = item.get_closest_marker("preload")
        for name in mark.args if mark else ():
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                return f"{error}; pip install 'hpcrun[integrations]'"
        gc.freeze()
        return None

    def _run(self, item: pytest.Item | None, request: Request) -> dict[str, str]:
        missing = item and self._preload(item)
        if missing:
            return {"outcome": "skipped", "text": missing, "output": ""}
        threads = len([*Path("/proc/self/task").iterdir()])
        if item is None or threads > 1:
            text = (
                f"the server of the ranks cannot collect {request.test}"
                if item is None
                else f"{threads} threads run in the server of the ranks, so that a fork is unsafe: "
                "a test file starts a thread when it is imported"
            )
            return {"outcome": "failed", "text": text, "output": ""}
        output = ""
        for phase, count in enumerate(request.counts):
            # Exit functions of a rank would remove a TemporaryDirectory of this process.
            folder = Path(tempfile.mkdtemp(prefix="ranks-"))
            try:
                self._request, self._phase, self._world_size = request, phase, count
                ranks = Forks(request, count, folder, self._socket)
                ranks.fork(lambda rank, folder=folder: self._play(item, rank, folder))
                outcome, text = ranks.wait()
                output += ranks.output()
            finally:
                shutil.rmtree(folder)
            if outcome != "passed":
                break
        return {"outcome": outcome, "text": text, "output": output}

    def _play(self, item: pytest.Item, rank: int, folder: Path) -> Ended:
        """Run the test as a rank; return its end."""
        assert self._request is not None
        self._rank = rank
        self._debugger = debugger.RankDebugger(rank, folder / f"{rank}.debugger")
        torch.set_num_threads(1)
        if self._request.group:
            self._join(rank, folder)
        else:
            # This process has no ranks to compare with. Its forks begin their own records.
            self._rules.off = True
        item.ihook.pytest_runtest_protocol(item=item, nextitem=None)
        for report in self._reports:
            if report.outcome != "passed":
                return ended(report)
        return Ended("passed")

    def _join(self, rank: int, folder: Path) -> None:
        """Make the default process group."""
        assert self._request is not None
        store = dist.FileStore(str(folder / "rendezvous"), self._world_size)
        # The stack of a rank that waits says more than an error of gloo after a timeout.
        timeout = timedelta(seconds=self._request.limit + 60)
        if debugger.is_on():
            timeout = timedelta(seconds=debugger.WAIT_SECONDS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=self._world_size, timeout=timeout
        )

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> bool:
        """Run a test of a rank without output."""
        self._reports = runtestprotocol(item, log=False)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_pyfunc_call(self) -> Iterator[None]:
        """Compare the collectives of the ranks at the end of the test function."""
        try:
            result = yield
        except Exception as error:
            if self._debugger is not None:
                self._debugger.look_at(error)
            raise
        if not self._rules.off:
            self._rules.compare()
        return result


def ended(report: pytest.TestReport) -> Ended:
    """Return the end of a rank that failed or was skipped."""
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        return Ended("skipped", report.longrepr[2], report.longrepr[2], report.stop)
    crash = getattr(report.longrepr, "reprcrash", None)
    text = report.longreprtext
    brief = crash.message if crash else text
    return Ended(report.outcome, text, brief.strip().partition("\n")[0], report.stop)


class Forks:
    """The ranks of a test, as the server sees them.

    Each rank writes three files: ``N.json`` (its end), ``N.log`` (its output) and ``N.stack``.
    """

    def __init__(self, request: Request, count: int, folder: Path, requests: socket.socket) -> None:
        self._request, self._count = request, count
        self._folder, self._requests = folder, requests
        self._running: dict[int, int] = {}
        self._ends: dict[int, Ended] = {}

    def fork(self, play: Callable[[int], Ended]) -> None:
        """Start the ranks."""
        server = os.getpid()
        for rank in range(self._count):
            child = os.fork()
            if child == 0:
                self._be(rank, server, play)
            self._running[rank] = child

    def _be(self, rank: int, server: int, play: Callable[[int], Ended]) -> NoReturn:
        """Run a rank in this process. Only a failed rank exits: other ranks may still need the others."""
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != server:
                os._exit(1)
            self._requests.close()
            log = os.open(self._folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(log, 1)
            os.dup2(log, 2)
            stack = (self._folder / f"{rank}.stack").open("w")
            faulthandler.register(_PRINT_STACK, stack)
            end = play(rank)
            sys.stdout.flush()
            sys.stderr.flush()
            part = self._folder / f"{rank}.part"
            part.write_text(json.dumps(asdict(end)))
            part.rename(self._folder / f"{rank}.json")
            while end.outcome != "failed":
                signal.pause()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(1)

    def wait(self) -> tuple[str, str]:
        """Wait for the ranks; return the outcome of the test and its report."""
        until = time.monotonic() + self._request.limit
        failed, last = False, time.monotonic()
        try:
            while len(self._ends) < self._count:
                before, last = last, time.monotonic()
                if any(self._folder.glob("*.debugger")):
                    until += last - before
                for rank in [*self._running]:
                    self._look(rank)
                if not failed and any(end.outcome == "failed" for end in self._ends.values()):
                    failed, until = True, min(until, time.monotonic() + GRACE_SECONDS)
                if time.monotonic() > until:
                    self._give_up(failed)
                elif select.select([self._requests], [], [], _LOOK_SECONDS)[0]:
                    sys.exit("the tests have ended")
        finally:
            for child in self._running.values():
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
        return self._summary()

    def _look(self, rank: int) -> None:
        """Note the end of a rank."""
        child, status = os.waitpid(self._running[rank], os.WNOHANG)
        if child:
            del self._running[rank]
        if rank in self._ends:
            return
        with contextlib.suppress(FileNotFoundError):
            self._ends[rank] = Ended(**json.loads((self._folder / f"{rank}.json").read_text()))
            return
        if child:
            code = os.waitstatus_to_exitcode(status)
            how = (
                f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
            )
            brief = f"the rank {how} before the end of the test"
            log = (self._folder / f"{rank}.log").read_text(errors="replace")
            self._ends[rank] = Ended("failed", f"{brief}\n{log}", brief, time.time())

    def _give_up(self, failed: bool) -> None:
        """Note the stacks of all ranks that still run."""
        after = (
            f"{GRACE_SECONDS:g} s after a failure" if failed else f"after {self._request.limit:g} s"
        )
        waiting = sorted(set(self._running) - set(self._ends))
        for rank in waiting:
            os.kill(self._running[rank], _PRINT_STACK)
        files = {rank: self._folder / f"{rank}.stack" for rank in waiting}
        # A rank prints its stack when the kernel next gives it time.
        late = time.monotonic() + _STACK_SECONDS
        while time.monotonic() < late and not all(file.stat().st_size for file in files.values()):
            time.sleep(_LOOK_SECONDS)
        time.sleep(20 * _LOOK_SECONDS)
        for rank, file in files.items():
            stack = file.read_text()
            lines = [line.strip() for line in stack.splitlines() if self._request.file in line]
            brief = f"still running {after}: {lines[0] if lines else 'outside of the test'}"
            self._ends[rank] = Ended("failed", f"{brief}\n{stack}", brief, time.time() + rank)

    def _summary(self) -> tuple[str, str]:
        ends = [self._ends[rank] for rank in range(self._count)]
        outcomes = {end.outcome for end in ends}
        if len(outcomes) == 1 and outcomes != {"failed"}:
            return ends[0].outcome, ends[0].text
        # A lost connection, and a rank that waits, follow from the failure of another rank.
        first = min(range(len(ends)), key=lambda rank: ends[rank].order())
        if not self._request.group:
            return "failed", ends[first].text
        lines = [f"rank {first} of {len(ends)}, the first rank that failed:", ends[first].text, ""]
        lines += [
            f"rank {rank}: {end.brief or end.outcome}"
            for rank, end in enumerate(ends)
            if rank != first
        ]
        return "failed", "\n".join(lines)

    def output(self) -> str:
        """Return the output of the ranks, with the rank before each line."""
        return "".join(
            f"rank {rank}: {line}\n"
            for rank in range(self._count)
            for line in (self._folder / f"{rank}.log").read_text(errors="replace").splitlines()
        )
