"""Rank 0 accepts a connection per rank, for any limit of the submitting shell."""

import subprocess
import sys

import pytest

PROGRAM = """
import resource
from hpcrun.train.parallel.process_group import allow_connections
resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard}))
allow_connections({ranks})
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("ranks", "soft", "hard", "limit", "line"),
    [
        (2, 1024, 1024, 1024, ""),
        (512, 1200, 4096, 1536, ""),
        (2000, 1024, 3000, 3000, "rank 0 may open 3000 files but needs about 4512 for 2000 ranks"),
    ],
)
def test_the_limit_becomes_what_the_ranks_need(
    ranks: int, soft: int, hard: int, limit: int, line: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(ranks=ranks, soft=soft, hard=hard)],
        capture_output=True,
        text=True,
        check=True,
        timeout=600,
    )
    assert done.stdout.splitlines()[-1] == str(limit)
    assert line in done.stdout
