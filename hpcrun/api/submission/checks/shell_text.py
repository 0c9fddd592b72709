"""Checks of the text of a shell: lines for sbatch in it, and exit codes that it hides."""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrun.api.submission.checks.concern import Concern, Submission
from hpcrun.api.submission.checks.launchers import program_of
from hpcrun.api.submission.requests import requests_in, submit_words
from hpcrun.config.commands.command import script_of
from hpcrun.config.commands.program_file import has_windows_lines, windows_lines
from hpcrun.config.commands.starters import PYTHON, shell_program, without_wrappers

_SEPARATORS = frozenset({";", "&&", "||", "|", "|&", "&", "(", ")", "{", "}"})
_KEEPS_CODES = re.compile(r"pipefail|PIPESTATUS|pipestatus")
# The loader of Linux expands the three names itself (ld.so(8)).
_FOR_A_SHELL = re.compile(r"^~/|(?:^|[/:])\$(?!\{?(?:ORIGIN|LIB|PLATFORM)\b)\{?[A-Z][A-Z0-9_]+")
_HARMLESS = frozenset({"true", ":", "echo", "printf"})
_STARTS_TRAINING = frozenset({"accelerate", "deepspeed", "torchrun"})


def ignored_requests(submission: Submission) -> Iterator[Concern]:
    """Find ``#SBATCH`` lines in a script that hpcrun starts: only sbatch reads them."""
    text = _text(submission)
    asked = requests_in(text or "", submission.config)
    if not asked:
        return
    words = " ".join(submit_words(asked))
    program = program_of(text or "")
    rest = f" -- {program}" if program else ""
    yield Concern(
        f"the #SBATCH lines of the script have no effect, because hpcrun submits another script; "
        f"write: hpcrun submit {words}{rest}"
    )


def carriage_returns(submission: Submission) -> Iterator[Concern]:
    """Find a script of a shell with Windows line endings: the shell would read them as parts of its words."""
    command = submission.config.command
    script = script_of(command) if command and _text(submission) is not None else None
    if script and has_windows_lines(submission.folder / script):
        yield Concern(f"{script} {windows_lines(script)}")


def unexpanded_values(submission: Submission) -> Iterator[Concern]:
    """Find variables of the job whose values only a shell would expand; the values stay secret."""
    for name, value in submission.config.job.env.items():
        found = _FOR_A_SHELL.search(value)
        if found:
            what = "a tilde" if found[0].startswith("~") else "the name of a variable"
            yield Concern(
                f"has {what} in its value, and no shell expands it; write the whole value, or a line in "
                f"job.setup: export {name}=…",
                f"job.env.{name}",
            )


def hidden_exit_codes(submission: Submission) -> Iterator[Concern]:
    """Find a shell that hides the exit code of a training: hpcrun would take a crash for a good end."""
    text = _text(submission)
    if text is None:
        return
    keeps = _KEEPS_CODES.search(text) or "pipefail" in submission.config.command
    steps = [step for step in _steps(text) if _trains(step[0])]
    for at, (words, operator, following) in enumerate(steps):
        redirected = next((i for i, word in enumerate(words) if set(word) & set("<>")), len(words))
        shown = " ".join(words[:redirected])[:60]
        if operator in ("|", "|&") and not keeps:
            yield Concern(
                f"{shown} {operator} …: the pipe hides the exit code, so a crash counts as a good end; put "
                "`set -o pipefail;` in front (bash)"
            )
        elif operator == "||" and following in _HARMLESS:
            yield Concern(
                f"{shown} || {following}: hides the exit code, so a crash counts as a good end; remove "
                f"`|| {following}`"
            )
        # A helper in the background ends with the program that the shell waits for.
        elif operator == "&" and at + 1 == len(steps) and not re.search(r"\bwait\b", text):
            yield Concern(
                f"{shown} &: the shell does not wait for it, so the run would end early; remove the &"
            )
        else:
            continue
        return


def _text(submission: Submission) -> str | None:
    command = submission.config.command
    return shell_program(command, submission.folder) if command else None


def _steps(text: str) -> Iterator[tuple[Sequence[str], str, str]]:
    """Yield the words of each command of a shell's text, the operator after it, and the next word."""
    for line in text.splitlines():
        lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        try:
            tokens = [*lexer, ";"]
        except ValueError:  # a quote over several lines
            continue
        words = list[str]()
        for at, token in enumerate(tokens):
            if token not in _SEPARATORS:
                words.append(token)
                continue
            # `2>&1` is a redirection.
            if token == "&" and words and words[-1].endswith(">"):
                continue
            yield words, token, tokens[at + 1] if at + 1 < len(tokens) else ""
            words = []


def _trains(words: Sequence[str]) -> bool:
    """Return True if the words start Python or a launcher of ranks with a script."""
    own = without_wrappers(words)
    name = Path(own[0]).name if own else ""
    starts = bool(PYTHON.fullmatch(name)) or name in _STARTS_TRAINING or name.endswith(".py")
    return starts and "-c" not in own
