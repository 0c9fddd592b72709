"""Text from a task, a script, a node or a file is data to a terminal."""

import io
import json
import os
import random
import re
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

import hpcrun
from hpcrun.printing import escaped, logged, quoted, say
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import Failure
from tests.cli.terminal import Terminal

PACKAGE = Path(hpcrun.__file__).parent
# These modules write log files, which the commands show as data.
INTO_LOGS = (
    "job/",
    "nodes/",
    "ranks/",
    "run/stacks.py",
    "slurm/local/controller.py",
    "train/",
    "worker.py",
)
# These write to pipes that a program reads.
INTO_PIPES = (
    "api/submission/checks/interpreter.py",
    "network/agent.py",
    "network/torch_rank.py",
)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J\x1b]0;title\x07", r"\x1b[2J\x1b]0;title\x07"),
        ("a\nhpcrun: run is finished\r", r"a\nhpcrun: run is finished\r"),
        ("\x9b31m \x85 \x00", r"\x9b31m \x85 \x00"),
        ("\u202edlo\u2066\u2028\u200b", r"\u202edlo\u2066\u2028\u200b"),
        (os.fsdecode(b"caf\xe9"), r"caf\xe9"),
        ("\U000e0041", r"\U000e0041"),
        ("a\tb", "a       b"),
        ("Zoë, 東京, Ωμέγα, \u06a9\u200c\u0647, 👩\u200d👩\u200d👧 \u00a0 100 %|██", None),
    ],
)
def test_control_characters_are_escaped_and_other_text_stays(text: str, shown: str | None) -> None:
    assert escaped(text) == (text if shown is None else shown)


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        (b"loss 0.5\r", "loss 0.5"),
        (b"  0%|\r 50%|\r100%|", "… 100%|"),
        (b"\r100%|", "100%|"),
        (b"\xff\x1b[0m", r"\xff\x1b[0m"),
    ],
)
def test_a_log_line_is_shown_as_on_a_terminal(line: bytes, shown: str) -> None:
    assert logged(line) == shown


def test_every_line_of_a_foreign_text_has_a_mark() -> None:
    stream = io.StringIO()
    say(*quoted("a\nhpcrun: forged\n\x1b[2J\n"), stream=stream)
    assert stream.getvalue() == "    | a\n    | hpcrun: forged\n    | \\x1b[2J\n"


PRINTS = re.compile(
    r"(?<![\w.])p?print\(|(console|rich)\.print\(|std(out|err)(__)?(\.buffer)?\.write|os\.write\([12],"
    r"|(tqdm|bar)\.write\(|print_exc\("
)


def test_commands_print_only_through_the_printing_module() -> None:
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        if place != "printing.py" and not place.startswith(INTO_LOGS + INTO_PIPES):
            found += [place for line in path.read_text().splitlines() if PRINTS.search(line)]
    assert not found, "call hpcrun.printing.say instead of print"


WILD = [
    "\x1b[2J\x1b[31mevil\x1b]0;PWN\x07", "\x1b]52;c;aGk=\x07", "\x9b31m", "\r\nhpcrun: forged", "\u202e",
    "\x00", "\b\b", "\x85", "\u2028", "é", "東京",
]  # fmt: skip


def wild(chance: random.Random) -> str:
    """Return random bytes as text, and sequences that terminals obey."""
    raw = os.fsdecode(chance.randbytes(chance.randrange(1, 40)))
    return raw + chance.choice(WILD) + chance.choice(WILD)


def obeyed(text: str) -> set[str]:
    """Return the control characters that a terminal received, except line ends."""
    return {
        letter for letter in text.replace("\r\n", "") if re.match(r"[\x00-\x1f\x7f-\x9f]", letter)
    }


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of runs with 1,000 random texts as names, hosts, metrics, reports, reasons and exceptions."""
    folder = tmp_path_factory.mktemp("hostile")
    chance = random.Random(7)
    for number in range(112):
        name = wild(chance).replace("/", "_").replace("\0", "_")
        run = RunDirectory(folder / "runs" / f"{number:03d}{name}"[:80])
        logs = run.attempt_logs(Attempt("1", 0))
        logs.mkdir(parents=True)
        run.config.write_text("job: {executor: local}\n")
        run.record.write_text("{}")
        opened = {"time": 1.0, "event": "opened", "job": "1", "restart": 0, "executor": "local"}
        run.events.write_text(json.dumps(opened))
        text, host, kind = wild(chance), wild(chance), wild(chance)
        failure = Failure(0, host, 1.0, kind, text, wild(chance), 3, f"Traceback\n{text}")
        (logs / "failure-rank-00000.json").write_text(json.dumps(asdict(failure)))
        line = os.fsencode(text) + b"\nhpcrun: " + os.fsencode(text) + b"\n"
        (logs / "rank-00000.log").write_bytes(line)
        facts = {"step": 3, "time": 1.0, "loss": 2.0, f"{wild(chance)}_per_second": 3.0}
        run.metrics.write_text(json.dumps(facts) + "\n")
        result = {"state": "failed", "cause": "crash", "reason": f"{wild(chance)}{wild(chance)}"}
        if number % 2:
            report = {wild(chance): wild(chance), wild(chance): 0.5}
            result = {"state": "finished", "steps": 3, "report": report}
        run.result.write_text(json.dumps(result))
    return folder


def test_no_control_character_of_random_text_reaches_a_terminal(hostile: Path) -> None:
    script = (
        "import sys, pathlib\n"
        "from hpcrun.cli.main import guarded\n"
        "from hpcrun.cli.follow import _Watcher\n"
        "from hpcrun.cli.output import print_end\n"
        "from hpcrun.config import Config\n"
        "from hpcrun.run.directory import RunDirectory\n"
        "for path in sorted(pathlib.Path('runs').iterdir()):\n"
        "    name = str(path.absolute())\n"
        "    for words in (['status', name], ['logs', '--rank', 'all', name], ['verify', name]):\n"
        "        guarded(words)\n"
        "    run = RunDirectory(path.absolute())\n"
        "    watcher = _Watcher(run, Config())\n"
        "    watcher.greet(False)\n"
        "    watcher._ask_every = 0.0\n"
        "    assert watcher.step()\n"
        "    watcher.close()\n"
        "    print_end(run)\n"
        "guarded(['status'])\n"
        "print('the end')\n"
    )
    (hostile / "all.py").write_text(script)
    screen = Terminal(hostile, columns=200, program=[sys.executable, "all.py"], term="dumb")
    screen.end()
    assert screen.text.rstrip().endswith("the end"), screen.text[-2000:]
    assert obeyed(screen.text) == set()
    assert not re.search(r"[\u202a-\u202e\u2028\u2066-\u2069]", screen.text)
    # Line ends come from hpcrun: a forged line would begin after a line break in the data.
    assert not re.search(r"^hpcrun: forged", screen.text, re.M)
    assert "東京" in screen.text
    assert "é" in screen.text


def test_the_progress_bar_shows_metric_names_as_data(tmp_path: Path) -> None:
    script = (
        "import os\n"
        "from hpcrun.cli.follow import ProgressDisplay, facts_of\n"
        "shown = ProgressDisplay(10)\n"
        "shown.begin(0, 1.0)\n"
        "line = {'loss': 1.0, 'e\\x1b[2J\\x9b\\r\\n_per_second': 3.0}\n"
        "shown.update(5, 2.0, facts_of(line))\n"
        "shown.say('forged\\x1b]0;x\\x07\\nline')\n"
        "shown.close()\n"
    )
    (tmp_path / "bar.py").write_text(script)
    screen = Terminal(tmp_path, program=[sys.executable, "bar.py"])
    assert screen.end() == 0, screen.text
    # tqdm's own controls: a carriage return, and the cursor up one line.
    assert obeyed(re.sub(r"\x1b\[A|\r", "", screen.text).replace("\n", "")) == set()
    assert r"e\x1b[2J\x9b\r\n/s 3" in screen.text
    assert r"forged\x1b]0;x\x07\nline" in screen.text
