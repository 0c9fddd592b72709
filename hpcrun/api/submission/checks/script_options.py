"""Check of the options after the command: an option of hpcrun there belongs to the script."""

import re
from collections.abc import Iterator

from hpcrun.api.submission.checks.concern import Concern, Submission
from hpcrun.config import Config, submit_options
from hpcrun.config.commands.command import script_of
from hpcrun.config.commands.rank_words import sources

_OF_THE_COMMAND = frozenset(
    {"dry-run", "prepare", "follow", "detach", "no-snapshot", "sweep", "max-parallel", "profile"}
)


def options_of_hpcrun(submission: Submission) -> Iterator[Concern]:
    """Find options of hpcrun for a Python script that does not name them in its source.

    Silent if a source cannot be read: the script may have the option.
    """
    command, launched = submission.config.command, submission.config.job.launcher is not None
    script = script_of(command, launched) if command else None
    if script is None or not script.endswith(".py"):
        return
    own = {name.replace("_", "-") for name in (*submit_options(), *submit_options(Config))}
    after = command[command.index(script) + 1 :]
    given = [word.partition("=")[0] for word in after if word.startswith("--")]
    names = [word for word in given if word[2:] in own | _OF_THE_COMMAND]
    if not names:
        return
    try:
        text = "\n".join(sources(submission.folder / script))
    except (OSError, SyntaxError, ValueError, LookupError):
        return
    missing = [word for word in names if not re.search(_spelled(word), text, re.IGNORECASE)]
    if missing:
        options = " and ".join(dict.fromkeys(missing))
        yield Concern(
            f"{options} after `--` goes to {script}, which does not name it; write options of hpcrun before "
            f"`--`: hpcrun submit {missing[0]} … -- {' '.join(command[: command.index(script) + 1])}"
        )


def _spelled(option: str) -> str:
    return option[2:].replace("-", "[-_]")
