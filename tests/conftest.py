"""Fixtures and hooks for all tests."""

import os
import re
import shutil
import signal
import tempfile
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.support import ports
from tests.support.on_ranks import RankTests
from tests.support.start_server import HOOK, VARIABLE, StartServer

# Long files start first: a long file that starts last would keep the other workers waiting. The browser uses
# the processor while tests on a real Slurm wait.
_LONGEST = (
    "on_slurm/test_chaos",
    "results/report/test_browser",
    "on_slurm/",
    "test_main_job",
    "slurm/launch/",
    "test_quickstart",
    "tools/",
    "cli/test_remote",
    "checkpoint/test_every_crash",
    "train/runs/test_runs",
    "train/parallel/test_equivalence",
)

# The longest slow test cancels 50 jobs, one after the other.
_SLOW_TIMEOUT_SECONDS = 2 * 3600

# Settings of the user or of the shell that starts the tests.
_PERSONAL = ("HPCRUN_", "XDG_", "GIT_", "NCCL_", "BASH_ENV", "HF_HOME", "MPLCONFIGDIR")
_OF_TESTS = (
    *("HPCRUN_TEST_", "HPCRUN_REQUIRE_SLURM", "HPCRUN_SLURM_UNAVAILABLE", "HPCRUN_WRITE_GOLDEN"),
    *("HPCRUN_CANCELLATIONS", "HPCRUN_VENV"),
)
_HOME = "HPCRUN_TEST_HOME"
# File of tools/progress_limit.py. A pytest that a test starts does not inherit the variable.
_progress = os.environ.pop("HPCRUN_TEST_PROGRESS", None)


def _isolate() -> Path | None:
    """Set the same environment for the tests on any machine; return the new home, None in a child of pytest.

    The processes that the tests start inherit it: other settings of a user would change their results.
    """
    for name in list(os.environ):
        if name.startswith(_PERSONAL) and not name.startswith(_OF_TESTS):
            del os.environ[name]
    # The number of threads changes the bits of a sum, and torchrun starts its ranks with one thread.
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    # Other users read files of root's tests. A socket needs a short path, a script one without blanks.
    os.umask(0o022)
    if os.geteuid() == 0 or not re.fullmatch(r"[\w./+-]{1,40}", tempfile.gettempdir()):
        for name in ("TMPDIR", "TEMP", "TMP"):
            os.environ.pop(name, None)
        tempfile.tempdir = None
    made = None
    if _HOME not in os.environ:
        made = Path(tempfile.mkdtemp(prefix="hpcrun-tests-home-"))
        made.chmod(0o755)
        # In CI the checkout belongs to another user, and git refuses it without this line.
        checkout = Path(__file__).resolve().parents[1]
        (made / ".gitconfig").write_text(f"[safe]\n\tdirectory = {checkout}\n")
        os.environ[_HOME] = str(made)
    os.environ["HOME"] = os.environ[_HOME]
    os.environ["GIT_CONFIG_GLOBAL"] = os.environ[_HOME] + "/.gitconfig"
    os.environ["GIT_CONFIG_NOSYSTEM"] = "1"
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(HOOK) not in path:
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HOOK), *path]))
    return made


_start_server: StartServer | None = None

# Before torch is imported, which reads the number of threads.
_made_home = _isolate()


def _unmoved(_number: int, _frame: object) -> None:
    """Handle a signal and continue."""


# A shell without job control starts a background command with SIGINT and SIGQUIT ignored, and nohup
# ignores SIGHUP. Programs that the tests start would inherit ignored signals. A handler keeps the tests
# running too, and is not inherited.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else _unmoved)

# The time of an example depends on the load of the machine.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_configure(config: pytest.Config) -> None:
    """Give the tests with ``@ranks(n)`` to a server of ranks, which is itself a pytest process."""
    global _start_server
    if not config.pluginmanager.has_plugin("tests.support.rank_server"):
        config.pluginmanager.register(RankTests())
        if VARIABLE not in os.environ:
            _start_server = StartServer()
            os.environ |= _start_server.variables


def pytest_unconfigure() -> None:
    """Remove the home of the tests, and end the server."""
    if _start_server is not None:
        _start_server.close()
    if _made_home is not None:
        shutil.rmtree(_made_home, ignore_errors=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long files first, and give slow tests more time. The order of other tests stays the same."""

    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(Path(__file__).parent).as_posix()
        found = [number for number, start in enumerate(_LONGEST) if place.startswith(start)]
        return min(found, default=len(_LONGEST))

    items.sort(key=rank)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_TIMEOUT_SECONDS))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure immediately: a killed run never reaches pytest's own list. Note each finished test."""
    if _progress is not None and report.when == "teardown":
        with Path(_progress).open("ab") as file:
            file.write(b".")
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)


@pytest.fixture
def free_port() -> int:
    """Return a TCP port of loopback without a listener."""
    return ports.free_port()


@pytest.fixture
def fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start Python programs as usual, without the start server."""
    monkeypatch.setenv(VARIABLE, "")


@pytest.fixture(autouse=True)
def outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove launcher variables from the environment of the tests."""
    for name in os.environ:
        if name.startswith(("SLURM_", "SBATCH_", "OMPI_", "TORCHELASTIC_", "HPCRUN_RUN")):
            monkeypatch.delenv(name)
