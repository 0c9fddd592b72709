"""Fixtures that several rooms' tests share."""

import os
import secrets
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from hpcrun.cluster.network.ports import is_free, port_candidates

# Those that wait most take longest: begun last, one of them would keep the other workers waiting.
_LONGEST = ("slurm/test_chaos", "slurm/", "test_main_job", "launch/", "test_quickstart", "tools/")

# The longest slow test cancels 50 jobs, one after the other.
_SLOW_TIMEOUT_SECONDS = 2 * 3600


def _unmoved(_number: int, _frame: object) -> None:
    """Handle a signal and go on."""


# A shell without job control starts what stands before a `&` with SIGINT and SIGQUIT ignored, and nohup
# ignores SIGHUP. The programs that the tests start would inherit that. A handler keeps the tests running as
# well, and is not inherited.
for _number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
    if signal.getsignal(_number) is signal.SIG_IGN:
        signal.signal(_number, signal.default_int_handler if _number == signal.SIGINT else _unmoved)

# How long an example takes says how busy the machine is.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Run the long files first, and give slow tests more time. Other tests keep their order."""

    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(Path(__file__).parent).as_posix()
        found = [number for number, start in enumerate(_LONGEST) if place.startswith(start)]
        return min(found, default=len(_LONGEST))

    items.sort(key=rank)
    for item in items:
        if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(_SLOW_TIMEOUT_SECONDS))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Print a failure at once: a run that is ended from outside never comes to pytest's own list."""
    if report.failed and "PYTEST_XDIST_WORKER" not in os.environ:
        print(f"\nFAILED {report.nodeid} ({report.when})\n{report.longreprtext}", flush=True)


@pytest.fixture
def free_port() -> int:
    """A TCP port of loopback that nobody listens on.

    Out of the range from which the kernel gives a port to whoever asks for any: between this and its
    use, another test's connection would take it.
    """
    candidates = port_candidates(str(secrets.randbelow(2**26)))
    return next(port for port in candidates if is_free("127.0.0.1", port))


@pytest.fixture(autouse=True)
def outside_any_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' own environment must not look like a launcher's."""
    for name in os.environ:
        if name.startswith(("SLURM_", "SBATCH_", "OMPI_", "TORCHELASTIC_", "HPCRUN_RUN")):
            monkeypatch.delenv(name)
