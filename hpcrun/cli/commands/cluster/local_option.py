"""The option ``--local`` of the checks: processes on this machine instead of nodes."""

import argparse

from hpcrun.errors import UserError

_MOST = 64


def add_local(parser: argparse._ActionsContainer, text: str) -> None:
    """Add ``--local`` with the help ``text``."""
    parser.add_argument("--local", type=int, metavar="N", help=text)


def require_local(local: int | None, least: int) -> None:
    """Raise UserError if ``--local`` is given and not between ``least`` and 64."""
    if local is not None and not least <= local <= _MOST:
        raise UserError(f"--local {local}: should be {least} to {_MOST}")
