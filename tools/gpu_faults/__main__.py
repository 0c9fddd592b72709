"""Plant each fault of ``faults.py`` in a copy of this checkout, and run the tests that must fail.

``python -m tools.gpu_faults [PART OF A NAME ...]`` prints a table; without arguments, of all faults. It takes
about eight minutes on one core. It exits with 1 if a fault is not caught, or if a test fails without a fault.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tools.gpu_faults.faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
LIMIT = 600.0
"""Seconds for the tests of a fault; a fault may cause a hang."""


def copy(root: Path) -> None:
    """Copy the files that git knows or would add to ``root``."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, root / name)


def planted(text: str, fault: Fault) -> str:
    """Return the text of a file with the fault; raises ValueError if an old text does not occur once."""
    for old, new in fault.edits:
        if text.count(old) != 1:
            raise ValueError(f"{fault.file}: {old!r} occurs {text.count(old)} times, not once")
        text = text.replace(old, new)
    return text


def failed_tests(root: Path, tests: tuple[str, ...]) -> list[str]:
    """Run tests in a copy; return those that fail, or a reason if they could not run to their end."""
    command = [sys.executable, "-m", "pytest", "-n", "0", "-q", "-rfE", "--tb=no", "-m", "not slow"]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        ended = subprocess.run(
            [*command, "-p", "no:cacheprovider", *tests],
            cwd=root,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LIMIT,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return [f"no end after {LIMIT:g} s"]
    names = [
        line.split(" ")[1].partition("::")[2].partition("[")[0]
        for line in ended.stdout.splitlines()
        if line.startswith(("FAILED tests", "ERROR tests"))
    ]
    if not names and ended.returncode:
        sys.exit(f"{' '.join(tests)}: pytest cannot run:\n{ended.stdout}{ended.stderr}")
    return sorted(set(names))


def main() -> int:
    wanted = [
        fault
        for fault in FAULTS
        if not sys.argv[1:] or any(part in fault.name for part in sys.argv[1:])
    ]
    missed = 0
    with tempfile.TemporaryDirectory(prefix="gpu-faults-") as folder:
        root = Path(folder)
        copy(root)
        for tests in sorted({fault.tests for fault in wanted}):
            if failed := failed_tests(root, tests):
                sys.exit(f"{' '.join(tests)} fails without a fault: {', '.join(failed)}")
        print("| planted fault | file | caught by |\n|---|---|---|", flush=True)
        for fault in wanted:
            path = root / "hpcrun" / fault.file
            before = path.read_text()
            path.write_text(planted(before, fault))
            failed = failed_tests(root, fault.tests)
            path.write_text(before)
            missed += not failed
            by = ", ".join(f"`{name}`" for name in failed) or "**not caught**"
            print(f"| {fault.name} | `{fault.file}` | {by} |", flush=True)
    print(f"\n{len(wanted) - missed} of {len(wanted)} are caught.")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
