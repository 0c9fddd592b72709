"""tools/test.sh installs more packages when slow tests are asked for."""

import shlex
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "tools" / "slow_packages.sh"


def sourced(lines: str) -> "subprocess.CompletedProcess[str]":
    """Run ``lines`` after the script, as test.sh would."""
    program = f"set -euo pipefail; . {shlex.quote(str(SCRIPT))}\n{lines}"
    return subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "asked"),
    [
        (["-m", "slow"], True),
        (["-mslow", "tests/on_slurm"], True),
        (["-m", "slurm and slow"], True),
        (["-m", "not slow", "-m", "slow or lifecycle"], True),
        ([], False),
        (["-m", "not slow"], False),
        (["-m", "slow", "-m", "lifecycle and not slow"], False),
        (["tests/slow", "-k", "slow"], False),
        (["-m", "slowest"], False),
    ],
)
def test_slow_tests_are_asked_for_by_the_last_mark(arguments: list[str], asked: bool) -> None:
    done = sourced(f"if asks_for_slow {shlex.join(arguments)}; then echo yes; fi")
    assert (done.returncode, done.stdout, done.stderr) == (0, "yes\n" if asked else "", "")


def test_only_missing_packages_are_installed_and_failures_are_reported(tmp_path: Path) -> None:
    made = tmp_path / "made-by-the-command"
    done = sourced(
        f"""
        PATH=$PATH:{tmp_path}
        want first sh touch {tmp_path / "no-need"}
        want second no-such-program false
        want third no-such-program true
        want fourth {made.name} install -m 755 /bin/true {made}
        echo "skipped:$HPCRUN_SLURM_UNAVAILABLE"
        """
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "skipped: second third\n"
    assert done.stderr.splitlines() == [
        f"NOTICE: THE TESTS WITH {what} ARE SKIPPED: no-such-program could not be installed"
        for what in ("second", "third")
    ]
    assert made.exists()
    assert not (tmp_path / "no-need").exists()
