"""Output of the program: JSON for every reader, and text for every terminal."""

import json
import sys
from typing import Any

from hpcrun.printing import say
from hpcrun.run.io.files import finite


def print_json(value: Any) -> None:
    """Print ``value`` on one line. JSON (RFC 8259) has no NaN and no infinity, so they become null."""
    say(json.dumps(finite(value), ensure_ascii=True, allow_nan=False))


def make_printable() -> None:
    """Print characters that the terminal's encoding lacks as escapes, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
