"""What leaves the program: JSON that every reader takes, and text that every terminal can show."""

import json
import sys
from typing import Any

from hpcrun.printing import say
from hpcrun.run.io.files import finite


def print_json(value: Any) -> None:
    """Print ``value`` on one line. JSON (RFC 8259) has no NaN and no infinity: they become null."""
    say(json.dumps(finite(value), ensure_ascii=True, allow_nan=False))


def make_printable() -> None:
    """Let a name that the terminal's encoding lacks be shown escaped instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
