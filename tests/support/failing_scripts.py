"""Twelve failures of a script, and the cause that each failure gets on every cluster."""

import re
from dataclasses import dataclass

PROGRAM = '''
"""Ends in the way that its argument names, on the last rank or on all; other ranks wait."""

import os
import resource
import signal
import sys
import time

way, rank, last = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1
if way == "import":
    import no_module_has_this_name
if way == "exit-2":
    sys.exit(print("fails.py: no such speed", file=sys.stderr) or 2)
if way == "exit-75":
    sys.exit(75)
if rank == (0 if way == "raises-first" else last):
    if way.startswith("raises"):
        raise ValueError("sample 7 is broken")
    if way == "exit-74":
        sys.exit(print("the disk is full", file=sys.stderr) or 74)
    if way == "memory":
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))
        bytearray(1 << 34)
    if way == "missing":
        open("no-data.bin")
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if way == "terminated":
        os.kill(os.getpid(), signal.SIGTERM)
time.sleep(600)
'''

# No exec: bash waits for its program.
WRAPPER = "python fails.py killed\nexit $?\n"


@dataclass(frozen=True)
class Way:
    """A failure: its command and options, and the cause and the words in result.json.

    ``rank``: the rank in the words, -1 for the last rank, None if any rank may be the first.
    """

    name: str
    command: tuple[str, ...]
    cause: str
    words: str
    rank: int | None = -1
    options: tuple[str, ...] = ()

    @property
    def has_rank(self) -> bool:
        """Return True if the words name a rank and its node."""
        return self.cause in ("crash", "bad-input")


def _fails(name: str, words: str, cause: str = "crash", rank: int | None = -1) -> Way:
    command = ("python", "fails.py", name)
    kind = f"ScriptFailed: {' '.join(command)} " if words.startswith(("was ", "ended ")) else ""
    return Way(name, command, cause, f"{kind}{words}", rank)


_SAMPLE = "ValueError: sample 7 is broken at "
_ONCE = ("restarts.no_progress=1",)

WAYS = (
    _fails("raises-first", _SAMPLE, rank=0),
    _fails("raises-last", _SAMPLE),
    _fails("killed", "was killed by SIGKILL"),
    _fails(
        "import",
        "ModuleNotFoundError: No module named 'no_module_has_this_name' at ",
        "bad-input",
        rank=None,
    ),
    _fails(
        "exit-2",
        "ended with exit code 2; its log ends with: fails.py: no such speed",
        rank=None,
    ),
    _fails("exit-74", "ended with exit code 74; its log ends with: the disk is full"),
    Way(
        "exit-75",
        ("python", "fails.py", "exit-75"),
        "continued",
        "the script asked to be continued (exit code 75)",
        options=_ONCE,
    ),
    _fails("memory", "out of memory: no message at "),
    Way(
        "wrapper",
        ("bash", "wrap.sh"),
        "crash",
        "ScriptFailed: bash wrap.sh ended with exit code 137: its program was killed by SIGKILL",
    ),
    Way(
        "hang",
        ("python", "fails.py", "hang"),
        "time-limit",
        "time limit near: the script died of the signal",
        options=_ONCE,
    ),
    _fails("terminated", "was killed by SIGTERM"),
    _fails(
        "missing",
        "FileNotFoundError: [Errno 2] No such file or directory: 'no-data.bin' at ",
        "bad-input",
    ),
)
NAMES = {way.name: way for way in WAYS}


def check(way: Way, result: dict[str, object], ranks: int) -> None:
    """Check result.json of a run with this failure."""
    reason = str(result["reason"])
    assert result["cause"] == way.cause, reason
    if not way.has_rank:
        assert reason.startswith(f"{way.words}; "), reason
        return
    found = re.match(r"rank (\d+) on (local|node)\d+: (.*)", reason)
    assert found, reason
    if way.rank is not None:
        assert int(found[1]) == way.rank % ranks, reason
    # An explanation may follow, and the number of ranks that failed later.
    assert found[3].startswith(way.words), reason
