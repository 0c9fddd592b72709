"""Options of sbatch and srun as a user writes them: short and long names, first letters, values, quotes.

Names and forms: the manual pages of Slurm 22.05 to 26.05, and the names that only the programs know
(``tasks-per-node``).
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

Program = Literal["sbatch", "srun"]

_COMMON = """
    account acctg-freq bb bbf begin chdir cluster cluster-constraint clusters comment consolidate-segments
    constraint container container-id container-type context contiguous core-spec cores-per-socket cpu-freq
    cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude exclusive export
    extra extra-node-info gid gpu-bind gpu-freq gpus gpus-per-node gpus-per-socket gpus-per-task gres
    gres-flags help hint hold input job-name licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu
    mem-per-gpu mem-update mincpus network nice no-kill nodefile nodelist nodes ntasks ntasks-per-core
    ntasks-per-gpu ntasks-per-node ntasks-per-socket ntasks-per-tres oom-kill-step open-mode output overcommit
    oversubscribe parsable partition power prefer priority profile propagate qos quiet reboot reservation
    resources resv-ports segment signal sockets-per-node spread-job spread-segments stepmgr switches
    tasks-per-node test-only thread-spec threads-per-core time time-min tmp tres-bind tres-per-task uid usage
    use-min-nodes verbose version wait wckey
    """
_OF_SBATCH = """
        array batch export-file external get-user-env ignore-pbs kill-on-invalid-dep no-requeue requeue
        wait-all-nodes wrap
        """
_OF_SRUN = """
        accel-bind async bcast bcast-exclude compress cpu-bind disable-status epilog exact external-launcher
        het-group ignore-signals immediate interactive jobid kill-on-bad-exit label mpi msg-timeout multi-prog
        no-allocate overlap pack-group preserve-env prolog pty quit-on-interrupt relative send-libs
        slurmd-debug task-epilog task-prolog threads treewidth unbuffered wait-for-children whole x11
        """
NAMES: dict[Program, frozenset[str]] = {
    "sbatch": frozenset([*_COMMON.split(), *_OF_SBATCH.split()]),
    "srun": frozenset([*_COMMON.split(), *_OF_SRUN.split()]),
}
"""The long names of the options of each program."""

_SHORT = {
    **{"A": "account", "B": "extra-node-info", "C": "constraint", "D": "chdir", "F": "nodefile"},
    **{"G": "gpus", "H": "hold", "J": "job-name", "L": "licenses", "M": "clusters", "N": "nodes"},
    **{"O": "overcommit", "Q": "quiet", "S": "core-spec", "V": "version", "W": "wait"},
    **{"b": "begin", "c": "cpus-per-task", "d": "dependency", "e": "error", "h": "help"},
    **{"i": "input", "k": "no-kill", "m": "distribution", "n": "ntasks", "o": "output"},
    **{"p": "partition", "q": "qos", "s": "oversubscribe", "t": "time", "v": "verbose"},
    **{"w": "nodelist", "x": "exclude"},
}
_SHORT_OF: dict[Program, dict[str, str]] = {
    "sbatch": {**_SHORT, "a": "array"},
    "srun": {
        **_SHORT,
        **{"E": "preserve-env", "I": "immediate", "K": "kill-on-bad-exit", "T": "threads"},
        **{"X": "disable-status", "Z": "no-allocate", "l": "label", "r": "relative", "u": "unbuffered"},
    },
}  # fmt: skip
# Options without a value, and options with a value in the same word only.
_SWITCHES = """
    async contiguous disable-status exact external external-launcher help hold ignore-pbs interactive label
    multi-prog no-allocate no-requeue overcommit overlap oversubscribe parsable preserve-env quiet
    quit-on-interrupt reboot spread-job spread-segments stepmgr test-only unbuffered usage use-min-nodes
    verbose version wait-for-children whole
    """
_OPTIONAL = """
    bcast compress exclusive get-user-env immediate kill-on-bad-exit nice no-kill propagate pty requeue
    resv-ports send-libs x11
    """
_WITHOUT_VALUE = frozenset(_SWITCHES.split())
_IN_THE_WORD = frozenset(_OPTIONAL.split())


@dataclass(frozen=True)
class GivenOption:
    """An option of sbatch or srun.

    ``name``: its long name; an abbreviation that several options share is kept. ``value``: None without one.
    ``text``: the words of the user. ``item``: their number in the list.
    """

    name: str
    value: str | None
    text: str
    item: int


def parse_options(program: Program, items: Sequence[str]) -> list[GivenOption]:
    """Return the options in ``items``, as getopt_long(3) of ``program`` reads them.

    An item may have several options, or a value in a separate word, since a line ``#SBATCH`` may.
    """
    words = [(word, number) for number, item in enumerate(items) for word in _words(item)]
    found, at = list[GivenOption](), 0
    while at < len(words):
        word, item = words[at]
        following = words[at + 1][0] if at + 1 < len(words) else None
        at += 1
        for name, value, needs_more in _of_word(program, word):
            given = value
            if needs_more and following is not None:
                given = following
                at += 1
            found.append(GivenOption(name, given, items[item].strip(), item))
    return found


def _words(item: str) -> list[str]:
    """Return the words of an item; one word with an equals sign keeps its spaces, as `#SBATCH` gets it."""
    name, equals, _ = item.partition("=")
    if equals and " " not in name.strip():
        item = item.strip()
        unquoted = re.fullmatch(r"(.*?=)(['\"])(.*)\2", item, re.DOTALL)
        return [unquoted[1] + unquoted[3] if unquoted else item]
    try:
        return shlex.split(item, comments=True)
    except ValueError:  # an open quote
        return item.split()


def _of_word(program: Program, word: str) -> Iterator[tuple[str, str | None, bool]]:
    """Yield the name and the value of each option in ``word``, and whether the next word is its value."""
    if word.startswith("--"):
        given, equals, value = word[2:].partition("=")
        name = full_name(program, given)
        yield name, value if equals else None, not equals and takes_value(program, name)
        return
    letters = word[1:] if word.startswith("-") else ""
    while letters:
        name, letters = _SHORT_OF[program].get(letters[0], letters[0]), letters[1:]
        if takes_value(program, name) or name in _IN_THE_WORD:
            # Slurm refuses `-n=2`; the user means 2.
            needs_more = not letters and takes_value(program, name)
            yield name, letters.lstrip("= ") or None, needs_more
            return
        yield name, None, False


def takes_value(program: Program, name: str) -> bool:
    """Return True if the option must have a value, which may be a separate word."""
    if name == "wait":
        return program == "srun"
    return name in NAMES[program] and name not in _WITHOUT_VALUE | _IN_THE_WORD


def full_name(program: Program, given: str) -> str:
    """Return the long name that begins with ``given``; ``given`` if none or several have them."""
    if given in NAMES[program]:
        return given
    found = [name for name in NAMES[program] if name.startswith(given)]
    return found[0] if len(found) == 1 else given


def joined_items(program: Program, items: object) -> object:
    """Return :func:`joined_words` of a list; anything else is returned unchanged; the schema reports it."""
    if not isinstance(items, list) or not all(isinstance(item, str | int) for item in items):
        return items
    return joined_words(program, items)


def joined_words(program: Program, items: Sequence[str | int]) -> list[str | int]:
    """Return the list with each value in a separate word joined to its option: ``["-n", "1"]`` is ``-n1``."""
    joined: list[str | int] = []
    for item in items:
        last = joined[-1] if joined else ""
        before = last if isinstance(last, str) else ""
        if before.startswith("-") and not str(item).startswith("-") and _waits(program, before):
            joined[-1] = f"{before}={item}" if before.startswith("--") else f"{before}{item}"
        else:
            joined.append(item)
    return joined


def _waits(program: Program, option: str) -> bool:
    """Return True if the option ``option`` has no value yet and must have one."""
    words = _words(option)
    return len(words) == 1 and any(more for *_, more in _of_word(program, words[0]))
