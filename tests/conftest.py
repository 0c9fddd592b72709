"""Fixtures and hooks for all tests."""

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests import ports
from tests.ranks import RankTests

# Long files start first: a long file that starts last would keep the other workers waiting.
_LONGEST = ("slurm/test_chaos", "slurm/", "test_main_job", "launch/", "test_quickstart", "tools/")

# The longest slow test cancels 50 jobs, one after the other.
_SLOW_TIMEOUT_SECONDS = 2 * 3600


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
    if not config.pluginmanager.has_plugin("tests.rank_server"):
        config.pluginmanager.register(RankTests())


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
    """Print a failure immediately: a killed run never reaches pytest's own list."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)


@pytest.fixture
def free_port() -> int:
    """Return a TCP port of loopback without a listener."""
    return ports.free_port()


@pytest.fixture(autouse=True)
def outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove launcher variables from the environment of the tests."""
    for name in os.environ:
        if name.startswith(("SLURM_", "SBATCH_", "OMPI_", "TORCHELASTIC_", "HPCRUN_RUN")):
            monkeypatch.delenv(name)
