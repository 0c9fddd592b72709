"""Bars of bytes on a terminal: verify, restore and export from a slow disk."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun.printing import progress_bar
from hpcrun.storage.store import CheckpointStore
from tests.checkpoint import faults, single_rank
from tests.cli.terminal import Terminal

ROOT = Path(__file__).parents[2]

SLOW_DISK = """
import sys, time
from hpcrun.storage.disk import FileSystem

read = FileSystem.read_into


def slowly(self, descriptor, view, position):
    time.sleep(0.2)
    return read(self, descriptor, view[: 200_000 if "verify" in sys.argv else 10_000], position)


FileSystem.read_into = slowly
"""

COMMAND = f"""{SLOW_DISK}
from hpcrun.cli.main import guarded

sys.exit(guarded(sys.argv[1:]))
"""

RESTORE_AND_EXPORT = f"""{SLOW_DISK}
from pathlib import Path
from hpcrun.cli.main import guarded
from tests.checkpoint import single_rank

found = single_rank.restored(Path(sys.argv[1]))
single_rank.require_state(found, 1)
print("restored", flush=True)
sys.exit(guarded(["export", sys.argv[1], sys.argv[2]]))
"""


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    """Return a list of terminals to kill at the end."""
    opened: list[Terminal] = []
    yield opened
    for terminal in opened:
        terminal.kill()


@pytest.fixture
def plain(tmp_path: Path) -> Path:
    """Return a folder with two checkpoints of plain bytes, 1.2 MB each."""
    root = tmp_path / "checkpoints"
    for step in (1, 2):
        faults.save(CheckpointStore(root, "7-0"), step)
    return root


def test_verify_shows_bytes_and_ctrl_c_clears_the_line(
    tmp_path: Path, plain: Path, terminals: list[Terminal]
) -> None:
    program = (sys.executable, "-c", COMMAND)
    screen = Terminal(tmp_path, "verify", str(plain), program=program)
    terminals.append(screen)
    bar = screen.read_until(r"verify: +(\d+)%\|[^\r]*\| [\d.]+[kM]/2\.40M \[[^\r]*B/s\]")
    assert len(bar[0]) <= 77
    screen.read_until(r"\r +\rstep 2: complete \(1\.2 MB\)")
    screen.read_until(r"verify: +\d+%")
    screen.read_until(r"step 1: complete \(1\.2 MB\)")
    assert screen.end() == 0
    # The bar has gone.
    assert re.search(r"\r *\r$", screen.text), screen.text

    screen = Terminal(tmp_path, "verify", str(plain), program=program)
    terminals.append(screen)
    screen.read_until(r"verify: +\d+%")
    screen.press_ctrl_c()
    screen.read_until(r"\r +\rhpcrun: interrupted\r\n")
    assert screen.end() == 130
    assert "verify" not in screen.text

    # A terminal without a cursor and a pipe get no bar.
    dumb = Terminal(tmp_path, "verify", str(plain), "--step", "1", term="dumb", program=program)
    terminals.append(dumb)
    assert dumb.end() == 0
    assert dumb.text == "step 1: complete (1.2 MB)\r\n"
    done = subprocess.run(
        [*program, "verify", str(plain), "--step", "1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("step 1: complete (1.2 MB)\n", "")


def test_restore_and_export_show_bytes(tmp_path: Path, terminals: list[Terminal]) -> None:
    root = tmp_path / "checkpoints"
    assert single_rank.save(single_rank.engine(root, "7-0"), 1).ok
    program = (sys.executable, "-c", RESTORE_AND_EXPORT, str(root), str(tmp_path / "model.pt"))
    screen = Terminal(tmp_path, program=program)
    terminals.append(screen)
    screen.read_until(r"restore step 1: +\d+%\|[^\r]*/80\.1k \[")
    screen.read_until(r"\r +\rrestored")
    screen.read_until(r"export: +\d+%\|[^\r]*/160k \[")
    screen.read_until(r"\r +\rhpcrun: [^\r]*model\.pt: the model of [^\r]* after step 1, 2 tensors")
    assert screen.end() == 0


def test_a_bar_without_a_terminal_only_prints(capsys: pytest.CaptureFixture[str]) -> None:
    with progress_bar("B", text="x") as bar:
        bar.move(1, 2)
        bar.describe("y")
        bar.say("a\x1b", "b")
        assert not bar.drawn
    assert capsys.readouterr() == ("a\\x1b\nb\n", "")
