"""The add-ons of hpcrun that the core calls by name, so that it imports none of them."""

from importlib import import_module
from typing import Any

from hpcrun.errors import UserError

_HOMES = {
    "sweep": "hpcrun.api.sweeps.submitting:submit_several",
    "sweep on a command line": "hpcrun.cli.sweep:run_sweep",
    "function": "hpcrun.api.functions:function_call",
    "run of a function": "hpcrun.api.functions:FunctionRun",
}


def add_on(name: str) -> Any:
    """Return the function or class of an add-on, which is imported at its first use.

    Raises:
        UserError: this installation lacks the add-on.
    """
    home, _, inside = _HOMES[name].partition(":")
    try:
        return getattr(import_module(home), inside)
    except ModuleNotFoundError as error:
        if error.name is None or not home.startswith(error.name):
            raise
        raise UserError(
            f"{name}: this installation of hpcrun lacks {home}; install hpcrun again"
        ) from error
