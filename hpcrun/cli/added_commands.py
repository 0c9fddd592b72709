"""Commands of other packages: found when a command line names none of hpcrun's, and for the help."""

from collections.abc import Callable, Mapping
from typing import Any

from hpcrun.errors import UserError
from hpcrun.ports.entry_points import Port


def added_port(own: Mapping[str, str]) -> Port:
    """Return the port of the commands; ``own``: the names of hpcrun's."""
    return Port("hpcrun.commands", "command", own)


def added_command(name: str, own: Mapping[str, str], near: Callable[[str, list[str]], str]) -> Any:
    """Return the command ``name`` of another package: an object such as the modules of hpcrun's commands.

    Args:
        name: the first word of the command line.
        own: the names of hpcrun's commands.
        near: returns a hint at the most similar name, or an empty text.

    Raises:
        UserError: there is no such command, or its package does not work.
    """
    port = added_port(own)
    # An option needs no look at the installed packages.
    added = [] if name.startswith("-") else [one.name for one in port.of_packages()]
    if name not in added:
        what = "option" if name.startswith("-") else "command"
        hint = near(name, [*own, *added, "--help", "--version"]) or "; see `hpcrun --help`"
        raise UserError(f"{name}: no such {what}{hint}")
    module = port.load(name)
    for needed in ("add_arguments", "run"):
        if not callable(getattr(module, needed, None)):
            package = port.find(name).package
            raise UserError(
                f"{name}: the command of the package {package} has no function {needed}; repair the package, "
                "or uninstall it"
            )
    return module


def added_lines(own: Mapping[str, str], width: int) -> list[str]:
    """Return the lines of `hpcrun --help` about the commands of other packages; no module is imported.

    Args:
        own: the names of hpcrun's commands.
        width: the columns of a name.
    """
    lines = [f"  {one.name:<{width}}  {one.summary}" for one in added_port(own).of_packages()]
    return ["", "commands of other packages:", *lines] if lines else []
