"""``@ranks(n)`` names the rank that failed, and the reason. The tests are in ``failing_on_ranks.py``."""

import fcntl
import os
import pty
import re
import subprocess
import sys
import termios
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Return pytest's report of each failed test, by name, and all of the output as ``""``.

    A person sits at the terminal, and debugs rank 1.
    """
    progress = tmp_path_factory.mktemp("progress") / "progress"
    keys, terminal = pty.openpty()
    for line in ("p rank + 41", "q", "c"):
        os.write(keys, f"{line}\n".encode())
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-rs", "tests/support/failing_on_ranks.py"],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "HPCRUN_TEST_PROGRESS": str(progress), "HPCRUN_TEST_DEBUG": "1"},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(terminal, termios.TIOCSCTTY, 0),
    )
    screen = os.read(keys, 65536).decode()
    os.close(keys)
    os.close(terminal)
    _, failures = done.stdout.split("= FAILURES =", 1)
    parts = re.split(r"\n_+ (test_\w+) _+\n", failures)
    return {
        "": done.stdout,
        "progress": progress.read_text(),
        "screen": screen,
        **dict(zip(parts[1::2], parts[2::2], strict=True)),
    }


def test_a_failed_assertion_shows_rank_values_and_output(reports):
    report = reports["test_an_assertion_of_one_rank"]
    assert report.startswith("rank 1 of 3, the first rank that failed:")
    assert "{'step': 1} != {'step': 7}" in report
    assert re.search(r"^rank 0: .+\nrank 2: .+$", report, re.MULTILINE)
    assert "rank 2: rank 2 was here" in report


def test_a_rank_that_waits_is_ended_with_its_stack(reports):
    report = reports["test_a_rank_that_waits"]
    assert 'failing_on_ranks.py", line 24 in test_a_rank_that_waits' in report
    assert re.search(r"^rank 1: still running after 8 s: .*line 23 in", report, re.MULTILINE)


def test_a_debugger_opens_on_the_chosen_rank(reports):
    first, second = reports["screen"].split("rank 1 stops here; q continues the test")[1:]
    assert "test_an_assertion_of_one_rank()" in first
    assert "42" in first
    assert "nccl_rules.py" in second


def test_nccl_rules_hold(reports):
    assert "NCCL needs contiguous tensors" in reports["test_a_collective_that_nccl_refuses"]


def test_passed_and_skipped_tests_stay_what_they_are(reports):
    assert "3 failed, 1 passed, 1 skipped" in reports[""]
    assert "a reason" in reports[""]
    # For tools/progress_limit.py.
    assert reports["progress"] == "....."
