"""The `hpcrun` program: find the command, and turn refusals into one line and exit code 2."""

import argparse
import contextlib
import difflib
import gc
import importlib
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any, NoReturn

from hpcrun import __version__
from hpcrun.errors import UserError
from hpcrun.exit_codes import INTERRUPTED
from hpcrun.folders import shipped
from hpcrun.printing import make_printable, say, say_aside

COMMANDS = {
    "init": "write a small program to begin with",
    "submit": "start a training, or continue one",
    "status": "show the state of runs",
    "logs": "show the output of a run's ranks",
    "stacks": "show where the Python code of a run's ranks is now",
    "doctor": "find out why a run or any job failed",
    "cancel": "save, then stop; `resume` continues",
    "resume": "continue a run from its newest checkpoint",
    "preempt": "send a run its time-limit warning signal",
    "aggregate": "collect runs into one HDF5 file",
    "compare": "compare configs over their seeds",
    "plot": "loss, learning rate and throughput of runs in the terminal",
    "report": "one HTML file about many runs",
    "verify": "read a run's checkpoints and compare every byte",
    "export": "write a run's model as safetensors, DCP or .pt",
    "estimate": "predict the memory on a GPU, without a GPU",
    "config": "show a resolved config, or the schema",
    "nodes": "list nodes that failed, and if they are excluded",
    "preflight": "check the nodes of a job before it starts",
    "netcheck": "check the network between the nodes of a job",
    "nccl": "check or choose NCCL's environment variables",
    "completion": "print the completion for a shell",
    "batch": "start a run's ranks in a Slurm job (batch scripts call it)",
    "finalize": "record the end of an attempt (the local cluster calls it)",
}
"""The commands: each a module of `hpcrun/cli/commands`. `added_commands` finds those of other packages."""

BEFORE_COMMANDS = {"--host": "hpcrun.cli.remote"}
"""The options before a command, each with the module that runs the command elsewhere."""

EXIT_CODES = """\
exit codes:
  0    done: the training is finished (if it was not followed: submitted)
  1    the run failed
  2    bad input; one line says what
  74   stopped, but the checkpoint could not be written
  75   stopped at a checkpoint, to be continued (resume)
  130  interrupted
"""

_LONGEST_LINE = 1200


class Parser(argparse.ArgumentParser):
    """argparse with its error on one line that ends with a remedy, and without abbreviated options."""

    def __init__(self, command: str, description: str | None) -> None:
        super().__init__(
            prog=f"hpcrun {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            # An abbreviation would change its meaning with the next option that is added.
            allow_abbrev=False,
        )

    def error(self, message: str) -> NoReturn:
        """Print ``message`` and exit with 2."""
        known = [option for action in self._actions for option in action.option_strings]
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            # The first of the words may be empty.
            option = (unknown.split("=")[0].split() or ["''"])[0]
            what = "no such option" if option.startswith("-") else "one argument too many"
            hint = ""
            if option.startswith("-") and "--partition" in known:
                from hpcrun.cli.other_options import elsewhere

                hint = elsewhere(option)
            message = f"{option}: {what}{f'; use {hint}' if hint else _near(option, known)}"
        text = _hidden(message.removeprefix("argument "), sys.argv[1:])
        say_aside(_bounded(f"{self.prog}: {text} (see {self.prog} --help)"))
        self.exit(2)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its code."""
    _open_streams()
    make_printable()
    sys.excepthook = _show_traceback
    sys.exit(guarded(list(sys.argv[1:] if argv is None else argv)))


def _open_streams() -> None:
    """Open the null device in place of a standard stream that the caller has closed (``hpcrun status >&-``).

    Otherwise the next file that this program opens gets the number of the stream, and the output of others.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            with contextlib.suppress(OSError):
                os.fstat(number)
                continue
            if os.open(os.devnull, os.O_RDWR) == number:
                os.set_inheritable(number, True)
                setattr(sys, name, os.fdopen(number, "w" if number else "r", closefd=False))


def guarded(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; refusals and interruptions print one line."""
    try:
        code = run_command(arguments)
        # Flush here, so that a write error is reported here and not by the exiting interpreter.
        sys.stdout.flush()
        return code
    except UserError as error:
        return print_refusal(*(_hidden(line, arguments) for line in error.lines))
    except KeyboardInterrupt as interrupt:
        say_aside(": ".join(["hpcrun: interrupted", *map(str, interrupt.args)]))
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has closed the pipe.
        _drop_output()
        return 0
    except OSError as error:
        if os.environ.get("HPCRUN_TRACEBACK"):
            raise
        try:
            sys.stdout.flush()
        except OSError:
            _drop_output()
        return print_refusal(_in_a_line(error))


def _hidden(text: str, arguments: Sequence[str]) -> str:
    """Return a line without the values of `job.env` among ``arguments``."""
    if not any("env" in word or word.startswith(("job", "watch", "notify")) for word in arguments):
        return text
    from hpcrun.config import hidden_values

    return hidden_values(arguments, text)


def _drop_output() -> None:
    """Discard what is left of the output: Python would print another error at exit, and exit with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def run_command(arguments: Sequence[str]) -> int:
    """Parse ``arguments``, beginning with the command, and return the command's exit code."""
    if arguments[:1] not in (["batch"], ["finalize"]):
        _require_folder()
    if (client := os.environ.pop("HPCRUN_CLIENT", None)) is not None:
        importlib.import_module(BEFORE_COMMANDS["--host"]).serve(client)
    if arguments and (home := BEFORE_COMMANDS.get(arguments[0].partition("=")[0])) is not None:
        elsewhere = importlib.import_module(home)
        there: int = elsewhere.run_there(*elsewhere.host_of(arguments), [*COMMANDS])
        return there
    if arguments[:1] == ["help"] and len(arguments) > 1:
        arguments = [arguments[1], "--help"]
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        say(*usage().split("\n"))
        return 0
    if arguments[0] in ("-V", "--version", "version"):
        say(f"hpcrun {__version__}")
        return 0
    name = arguments[0]
    if name in COMMANDS:
        module: Any = _imported(name)
    else:
        from hpcrun.cli.added_commands import added_command

        module = added_command(name, COMMANDS, _near)
    parser = Parser(name, module.__doc__)
    module.add_arguments(parser)
    rest, command = _split_at_dashes(arguments[1:])
    if any(word.partition("=")[0] == "--host" for word in rest):
        raise UserError(f"--host: comes before the command: hpcrun --host HOST {name}")
    if command is not None and name != "submit":
        raise UserError(f"{name}: takes no command after `--`; remove it")
    if command == []:
        raise UserError("submit: there is no command after `--`; write one, or remove `--`")
    parsed = parser.parse_intermixed_args(rest)
    parsed.command = command or []
    code: int = module.run(parsed)
    return code


def _imported(command: str) -> ModuleType:
    """Import the module of ``command``, with no search for garbage among modules, now and at exit.

    Modules stay until the exit. The search takes about a fifth of the time of a short command.

    Raises:
        UserError: a package is not installed, as on a laptop that only calls other hosts.
    """
    name = f"hpcrun.cli.commands.{command}"
    if name in sys.modules:
        return sys.modules[name]
    gc.disable()
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] == "hpcrun":
            raise
        raise UserError(
            f"{command}: the package {error.name} is not installed here; `pip install hpcrun` installs it, "
            f"or run the command on another host: hpcrun --host HOST {command}"
        ) from error
    finally:
        gc.freeze()
        gc.enable()


def usage() -> str:
    """Return the text of `hpcrun --help`."""
    from hpcrun.cli.added_commands import added_lines

    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: hpcrun [--host HOST] COMMAND [options]     (each command has --help)",
            "",
            "PyTorch training on Slurm or on this machine. Preemption, time limits, crashes",
            "and node failures cost time, and do not change the final weights.",
            "",
            "commands:",
            *lines,
            *added_lines(COMMANDS, width),
            "",
            EXIT_CODES.rstrip(),
            "",
            f"docs, configs, sbatch and examples are in {shipped('docs').parent}",
        ]
    )


def _split_at_dashes(arguments: Sequence[str]) -> tuple[list[str], list[str] | None]:
    """Return the words before and after the first ``--``, which argparse would drop; None without ``--``."""
    if "--" not in arguments:
        return list(arguments), None
    at = list(arguments).index("--")
    return list(arguments[:at]), list(arguments[at + 1 :])


def _near(word: str, known: Iterable[str]) -> str:
    # Without the dashes, which any two short options have in common.
    names = {name.lstrip("-"): name for name in known}
    near = difflib.get_close_matches(word.lstrip("-"), names, n=1)
    return f"; did you mean {names[near[0]]}?" if near else ""


def _require_folder() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise UserError(
            f"the current folder is gone ({error.strerror}); `cd` to one that exists"
        ) from error


def _show_traceback(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    """Print an unexpected error; its text may contain control characters."""
    import traceback

    text = _hidden("".join(traceback.format_exception(kind, error, trace)), sys.argv[1:])
    say_aside(*text.rstrip("\n").split("\n"))


def print_refusal(*lines: str) -> int:
    """Print the lines of a refusal, and return its exit code."""
    for line in lines:
        say_aside(_bounded(f"hpcrun: {line}"))
    return 2


def _bounded(line: str) -> str:
    """Return the begin and the end of a long line: a word of the command line may have 128 KiB."""
    return line if len(line) <= _LONGEST_LINE else f"{line[: _LONGEST_LINE - 300]} … {line[-297:]}"


def _in_a_line(error: OSError) -> str:
    place = f"{error.filename}: " if error.filename else "writing the output: "
    return (
        f"{place}{error.strerror or error}; check its owner and the free space "
        "(HPCRUN_TRACEBACK=1 shows the traceback)"
    )
