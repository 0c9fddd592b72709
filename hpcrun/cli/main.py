"""The `hpcrun` program: finds the command, and turns refusals into one line and exit code 2."""

import argparse
import difflib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

from hpcrun import __version__
from hpcrun.errors import UserError

COMMANDS = {
    "submit": "start a training, or continue one",
    "status": "where runs stand",
    "logs": "what a run's ranks print",
    "cancel": "save, then stop; `resume` continues",
    "resume": "continue a run from its newest checkpoint",
    "preempt": "do to a run what a preemption does",
    "config": "show a resolved config, or the schema",
    "settle": "judge an attempt that has ended (batch scripts call it)",
}

EXIT_CODES = """\
exit codes:
  0   done: the training is finished (for commands that do not follow one: it worked)
  1   the run failed
  2   bad input; one line says what
  75  stopped at a checkpoint, to be continued (resume)
  74  stopped, but the checkpoint could not be written
  130 interrupted
"""


class Parser(argparse.ArgumentParser):
    """argparse, with its complaint on one line that ends in what to do."""

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit with 2."""
        known = [option for action in self._actions for option in action.option_strings]
        unknown = message.removeprefix("unrecognized arguments: ")
        near = difflib.get_close_matches(unknown.split("=")[0].split()[0], known, n=1)
        if unknown != message and near:
            message = f"{unknown}: no such option; did you mean {near[0]}?"
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    sys.exit(guarded(arguments))


def guarded(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; refusals and interruptions are told in a line."""
    try:
        return run_command(arguments)
    except UserError as error:
        for line in str(error).splitlines():
            print(f"hpcrun: {line}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("hpcrun: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has seen enough; Python would complain again while it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run_command(arguments: Sequence[str]) -> int:
    """Parse ``arguments``, whose first is the command, and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if arguments[0] in ("-V", "--version"):
        print(f"hpcrun {__version__}")
        return 0
    name = arguments[0]
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else "see `hpcrun --help`"
        raise UserError(f"{name}: no such command; {hint}")
    module = importlib.import_module(f"hpcrun.cli.{name}")
    parser = Parser(
        prog=f"hpcrun {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    module.add_arguments(parser)
    rest, command = _split_at_dashes(arguments[1:])
    if command and name != "submit":
        raise UserError(f"{name}: takes no command after `--`")
    parsed = parser.parse_args(rest)
    parsed.command = command
    code: int = module.run(parsed)
    return code


def _split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """What stands before and after the first ``--``, which argparse would swallow."""
    if "--" not in arguments:
        return list(arguments), []
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def usage() -> str:
    """The text of `hpcrun --help`."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hpcrun COMMAND [options]     (each command has --help)",
            "",
            "PyTorch training on Slurm, or on this machine, that survives what clusters do.",
            "",
            "commands:",
            *lines,
            "",
            EXIT_CODES.rstrip(),
        ]
    )
