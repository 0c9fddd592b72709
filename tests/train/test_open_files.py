"""Rank 0 accepts a connection per rank, for any limit of the submitting shell."""

import subprocess
import sys

import pytest

from hpcrun.train.parallel.process_group import make_room


def asked(ranks: int, soft: int, hard: int) -> list[str]:
    """Return the printed line and the limit afterwards, in a process with these limits."""
    program = (
        "import resource\n"
        "from hpcrun.train.parallel.process_group import make_room\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))\n"
        f"print(make_room({ranks}))\n"
        "print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=600
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(("ranks", "limit"), [(64, 2048), (512, 1536), (1000, 2512)])
def test_the_limit_becomes_what_the_ranks_need_and_never_less(ranks: int, limit: int) -> None:
    assert asked(ranks, 1200 if ranks > 64 else 2048, 4096) == ["None", str(max(limit, 1200))]


def test_a_limit_that_cannot_be_raised_is_reported_with_a_remedy() -> None:
    told, limit = asked(2000, 1024, 3000)
    assert limit == "3000"
    assert told == (
        "rank 0 may open 3000 files but needs about 4512 for 2000 ranks; ask the site to raise the "
        "hard limit (ulimit -Hn) on the nodes"
    )


def test_few_ranks_change_nothing() -> None:
    assert make_room(2) is None
    assert asked(256, 1024, 1024) == ["None", "1024"]
