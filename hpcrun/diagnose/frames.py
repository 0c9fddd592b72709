"""The place of an error in the frames of a traceback."""

import re

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)(?:, in (?P<name>\S+))?')
_LIBRARY = re.compile(
    r"(site|dist)-packages|/lib/python\d|<frozen|<string>|lightning_fabric|/torch/"
)
_WORDLESS = re.compile(r"[\w.]+(: ?)?$")
_LONGEST = 120
"""Characters of a line of source."""


def place(frames: str, message: str) -> str:
    """Return where an error was raised, as text behind ``message``.

    The last frame of the program comes before frames of libraries, since the program chose the call.
    A message without words gets the line of source that raised it: the condition of an assertion.

    Args:
        frames: the lines of the traceback.
        message: the line of the exception.

    Returns:
        the place in brackets after a blank; "" without a frame.
    """
    lines = frames.splitlines()
    found = [(frame, at) for at, line in enumerate(lines) if (frame := _FRAME.search(line))]
    if not found:
        return ""
    last, at = found[-1]
    own = next((one for one, _ in reversed(found) if not _LIBRARY.search(one["file"])), last)
    source = lines[at + 1].strip() if len(lines) > at + 1 else ""
    words = f"`{source[:_LONGEST]}`, " if _WORDLESS.match(message) and source else ""
    behind = "" if own is last else f", raised in {_named(last)}"
    return f" ({words}{_named(own)}{behind})"


def _named(frame: "re.Match[str]") -> str:
    path = "/".join(re.split(r"[/\\]", frame["file"])[-2:])
    name = "" if frame["name"] in (None, "<module>") else f" in {frame['name']}"
    return f"{path}:{frame['line']}{name}"
