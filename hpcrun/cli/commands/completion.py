"""Print the completion of hpcrun's commands, options, keys and runs for a shell.

  bash   FOLDER is ~/.local/share/bash-completion/completions
         hpcrun completion bash > FOLDER/hpcrun
  zsh    hpcrun completion zsh > ~/.hpcrun.zsh
         add `source ~/.hpcrun.zsh` to ~/.zshrc

The shell starts no Python for it. Repeat the command after an upgrade.
"""

import argparse
import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hpcrun.cli.added_commands import added_command, added_port
from hpcrun.cli.arguments import require_subcommand
from hpcrun.config import Config
from hpcrun.config.schema import kind_at, known_keys
from hpcrun.errors import UserError
from hpcrun.printing import say, say_aside

_SHELLS = ("bash", "zsh")
_INTERNAL = ("batch", "finalize")
# With these lines zsh understands the completion of bash.
_ZSH = (
    "(( $+functions[compdef] )) || { autoload -Uz compinit && compinit }",
    "autoload -Uz bashcompinit && bashcompinit",
)
# Words that a program of the cluster knows, by option.
_ASKED = {"--partition": "$(sinfo -h -o %R 2>/dev/null)"}
_LIST = 'cd "${HPCRUN_RUNS:-runs}" 2>/dev/null && ls -d -- */ 2>/dev/null | tr -d /'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's argument."""
    parser.usage = "hpcrun completion bash|zsh"
    parser.add_argument("shell", metavar="bash|zsh", nargs="?", help="the shell")


def run(arguments: argparse.Namespace) -> int:
    """Print the completion."""
    shell = require_subcommand("completion", arguments.shell, _SHELLS, "shell")
    say(*(_ZSH if shell == "zsh" else ()), *_bash())
    return 0


@dataclass(frozen=True)
class _Command:
    """Words of a command, and if it takes a run.

    ``values``: by option; None if the option takes no value. ``words``: other words.
    """

    values: dict[str, list[str] | None]
    words: list[str]
    runs: bool


def _commands() -> dict[str, _Command]:
    from hpcrun.cli.main import Parser

    leaves = [key for key in known_keys(Config) if kind_at(key.split(".")) != "section"]
    keys, found = [f"{key}=" for key in leaves], {}
    for name, module in [*_own_modules(), *_added_modules()]:
        parser = Parser(name, None)
        module.add_arguments(parser)
        values, words, runs = dict[str, list[str] | None](), list[str](), False
        for action in parser._actions:
            metavar = str(action.metavar or "")
            runs = runs or (not action.option_strings and "RUN" in metavar)
            words += keys if action.dest == "overrides" else []
            choices = [str(choice) for choice in action.choices or ()]
            if not choices and "|" in metavar and metavar.islower():
                choices = metavar.split("|")
            if not action.option_strings:
                words += choices if action.choices is None else []
            for option in action.option_strings:
                # The shell completes the file of an option without words.
                values[option] = None if action.nargs == 0 else choices
        found[name] = _Command(values, words, runs)
    return dict(sorted(found.items()))


def _own_modules() -> Iterator[tuple[str, Any]]:
    from hpcrun.cli.main import COMMANDS

    for name in COMMANDS.keys() - _INTERNAL:
        yield name, importlib.import_module(f"hpcrun.cli.commands.{name}")


def _added_modules() -> Iterator[tuple[str, Any]]:
    """Yield the commands of other packages; a line names each that cannot be imported."""
    from hpcrun.cli.main import COMMANDS

    for added in added_port(COMMANDS).of_packages():
        try:
            yield added.name, added_command(added.name, COMMANDS, lambda *_: "")
        except UserError as error:
            say_aside(f"hpcrun: {error}")


def _bash() -> Iterator[str]:
    commands = _commands()
    yield f"_hpcrun_runs() {{ ({_LIST}); }}"
    yield "_hpcrun() {"
    yield '    local cur="${COMP_WORDS[COMP_CWORD]}" prev="${COMP_WORDS[COMP_CWORD-1]}" words word at=1'
    # Bash splits --host=HOST at the equals sign, and zsh does not.
    yield '    [ "$COMP_CWORD" = 1 ] || case "${COMP_WORDS[1]} ${COMP_WORDS[2]}" in'
    yield '    "--host =") at=4 ;; "--host "*) at=3 ;; "--host="*) at=2 ;; esac'
    yield '    [ "$COMP_CWORD" -ge "$at" ] || return 0'
    yield '    if [ "$COMP_CWORD" = "$at" ]; then'
    yield f'    words="{" ".join(commands)} --help --version"; [ "$at" = 1 ] && words+=" --host"; else'
    yield '    for word in "${COMP_WORDS[@]:1:$((COMP_CWORD-1))}"; do [ "$word" = -- ] && return; done'
    yield '    case "${COMP_WORDS[at]} $prev" in'
    for name, command in commands.items():
        for option, values in command.values.items():
            if values is not None:
                yield f'    "{name} {option}") words="{_ASKED.get(option, " ".join(values))}" ;;'
    for name, command in commands.items():
        words = " ".join([*command.values, *command.words])
        yield f'    "{name} "*) words="{words}{" $(_hpcrun_runs)" if command.runs else ""}" ;;'
    yield "    esac; fi"
    # Not compgen: that of zsh does not compare with the word.
    yield "    COMPREPLY=(); for word in $words; do"
    yield '    [[ "$word" == "$cur"* ]] && COMPREPLY+=("$word"); done'
    yield '    if [[ "${COMPREPLY[0]}" == *= ]]; then compopt -o nospace 2>/dev/null; fi'
    yield "}"
    yield "complete -o default -F _hpcrun hpcrun"
