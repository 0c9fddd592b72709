"""Tests on several ranks: ``@ranks(n)`` runs a test function on ``n`` real gloo ranks.

A distributed test keeps its scenario and its assertions in one function::

    from tests.support.on_ranks import agreed, ranks

    @ranks(4)
    def test_every_rank_learns_of_the_save(rank, tmp_path):
        outcome = save(tmp_path, rank)
        assert outcome.ok
        assert agreed(outcome.path) == tmp_path / "step-000000001"

- Each rank is a process with a default process group of gloo and one thread for torch. Each rank runs the
  function and its fixtures, as pytest does for any test: parameters, ``monkeypatch`` and ``capsys`` work.
- ``rank`` and ``world_size`` are fixtures. ``tmp_path`` is one folder for all ranks. Every other fixture is
  made on each rank, also a fixture of a wider scope.
- A failed test shows pytest's report of the rank that failed first, and one line for each other rank.
- A rank that does not end within ``limit`` seconds is killed; the report shows its stack.
- After a rank has failed, the other ranks have a few seconds until they are killed.
- Collectives of the default group must follow NCCL's rules (``tests/support/training/nccl_rules.py``), also
  those of ``fork_ranks``.
- ``@ranks(4, 2)`` runs the function on four ranks, and then on two new ranks with the same ``tmp_path``: the
  function asks ``world_size``, or ``phase`` (0, 1, ...), what to do.
- Parameters may choose the number of ranks: ``pytest.param(2, marks=ranks(2))``.

A test of whole processes, with their exit codes, has ``@forked`` instead: the function runs in a process with
torch and without threads, and forks the processes itself (``tests/support/training/forks.py``)::

    @forked
    def test_a_rank_that_raises_ends_the_run(tmp_path):
        played = play_run(tmp_path, RaisesOnRank1)
        assert played.codes == FAILED

Each worker of pytest has a server (``tests/support/rank_server.py``), which imports torch once and never
starts a thread. The server forks the ranks of each test: gloo's threads would not survive a fork.
``tests/support/debugger.py`` opens a debugger on a rank.
"""

import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
from typing import Any

import pytest

from tests.support import debugger

LIMIT_SECONDS = 300.0


def ranks(*counts: int, limit: float = LIMIT_SECONDS) -> pytest.MarkDecorator:
    """Return a decorator that runs a test function on gloo ranks; see the top of this file.

    Args:
        counts: number of ranks. With several numbers, the function runs for each, one after the other, in
            the same folder.
        limit: seconds after which a rank that still runs is killed.
    """
    return pytest.mark.ranks(*counts, limit=limit)


forked = pytest.mark.ranks(1, limit=LIMIT_SECONDS, group=False)
"""A decorator that runs a test function in a fork of the server, which may fork; ``@forked(limit=600)``."""


def gathered(value: Any) -> list[Any]:
    """Return the values of all ranks, by rank. Collective."""
    import torch.distributed as dist

    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def agreed(value: Any) -> Any:
    """Return ``value``, which must be equal on all ranks. Collective."""
    values = gathered(value)
    assert values == [value] * len(values)
    return value


class RankTests:
    """Plugin of the process that runs the tests: gives tests with the mark ``ranks`` to the server."""

    def __init__(self) -> None:
        self._server: Server | None = None
        self._files: list[str] = []

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note the files with tests on ranks."""
        found = {str(item.path) for item in session.items if item.get_closest_marker("ranks")}
        self._files = sorted(found)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Make only the folder here: the ranks make the fixtures of the test."""
        if item.get_closest_marker("ranks"):
            assert isinstance(item, pytest.Function)
            item.fixturenames[:] = ["tmp_path"]

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        """Run the test on ranks, and report their result as the result of the test."""
        mark = pyfuncitem.get_closest_marker("ranks")
        if mark is None:
            return None
        request = {
            "file": str(pyfuncitem.path),
            "test": pyfuncitem.nodeid,
            "counts": mark.args,
            "folder": str(pyfuncitem.funcargs["tmp_path"]),
            **mark.kwargs,
        }
        if self._server is None:
            self._server = Server(pyfuncitem.config, self._files)
        try:
            answer = self._server.ask(request)
        except BaseException:
            # A timeout of pytest, or Ctrl-C: the server is in the middle of a test.
            self._server.kill()
            self._server = None
            raise
        print(answer["output"], end="")
        if answer["outcome"] == "failed":
            pytest.fail(answer["text"], pytrace=False)
        if answer["outcome"] == "skipped":
            pytest.skip(answer["text"])
        return True

    def pytest_unconfigure(self) -> None:
        if self._server is not None:
            self._server.close()


class Server:
    """A process of ``tests/support/rank_server.py``."""

    def __init__(self, config: pytest.Config, files: list[str]) -> None:
        self._socket, other = socket.socketpair()
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        names = ("PYTEST_ADDOPTS", "PYTEST_XDIST", "SLURM_", "HPCRUN_RUN")
        environment = {k: v for k, v in os.environ.items() if not k.startswith(names)}
        # Libraries that start a thread at import would make each fork unsafe.
        threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
        environment |= dict.fromkeys(threads, "1")
        with other:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "pytest", "-p", "tests.support.rank_server"),
                    *("-p", "no:cacheprovider", "-p", "no:xdist", "--capture=no", "--timeout=0"),
                    # A rank prints its warnings, as in a user's run.
                    *("-p", "no:warnings"),
                    "--runxfail",
                    *(f"--rank-server={other.fileno()}", f"--tb={config.getoption('tbstyle')}"),
                    f"--verbosity={config.getoption('verbose')}",
                    *files,
                ],
                cwd=config.rootpath,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                pass_fds=[other.fileno()],
                # A debugger needs the terminal of this session.
                start_new_session=not debugger.is_on(),
            )
        self._answers = self._socket.makefile("r")

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a test and return its outcome."""
        with contextlib.suppress(BrokenPipeError):
            self._socket.sendall(json.dumps(request).encode() + b"\n")
        line = self._answers.readline()
        if not line:
            self._log.seek(0)
            raise RuntimeError(f"the server of the ranks has ended:\n{self._log.read()}")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the server, which waits for a test."""
        self._socket.close()
        self._answers.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """Kill the server; the kernel then kills its ranks."""
        self._process.kill()
        self._process.wait()
