"""The words of a known message, with its cause and its remedy."""

from hpcrun.diagnose.state_dict import OTHER_MODEL, WRAPPED, wrapper_in
from hpcrun.run.failures.catalog import KnownMessage, match, named, of_traceback

_SHORT = 120
"""Characters: for longer messages, only the known words are repeated."""


def explained(message: str, where: str = "", traceback: str = "") -> str | None:
    """Return the words of ``message`` with cause and remedy; None for an unknown message.

    Args:
            where: the place of the error, which follows a short message.
            traceback: the traceback that the message ends.
    """
    known = _first_known(message)
    if known is None:
        return None
    entry, line = of_traceback(known[0], traceback) or known[0], known[1].strip()
    of_line = match(known[1][:4000])
    found = of_line and of_line.search(line)
    assert found
    words = f"{line}{where}" if len(line) <= _SHORT else found[0][:_SHORT]
    return f"{words}: {entry.cause}; {entry.remedy}"


def known_cause(message: str) -> KnownMessage | None:
    """Return the initiating entry of the first line of ``message`` that has one, or None."""
    known = _first_known(message)
    return known[0] if known else None


def _first_known(message: str) -> tuple[KnownMessage, str] | None:
    """Return the initiating entry of the first line that has one, and the line."""
    for line in message.splitlines():
        entry = match(line[:4000])
        if entry and entry.role == "initiating":
            if entry.id == OTHER_MODEL and wrapper_in(message):
                entry = named(WRAPPED)
            return entry, line
    return None
