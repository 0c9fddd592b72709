"""The stop flag of a rank."""

import signal
from collections.abc import Iterator

import pytest

from hpcrun.ranks.signals import StopFlag


@pytest.fixture
def flag() -> Iterator[StopFlag]:
    """Return a flag that handles the signals to this process."""
    kept = {
        number: signal.getsignal(number)
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
    }
    flag = StopFlag()
    flag.install()
    yield flag
    for number, handler in kept.items():
        signal.signal(number, handler)
