"""What leaves the program: JSON that every reader takes, and text that every terminal can show."""

import json
import math
import sys
from typing import Any


def print_json(value: Any) -> None:
    """Print ``value`` on one line. JSON (RFC 8259) has no NaN and no infinity: they become null."""
    print(json.dumps(_finite(value), ensure_ascii=True, allow_nan=False))


def make_printable() -> None:
    """Let a name that the terminal's encoding lacks be shown escaped instead of ending the program."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
