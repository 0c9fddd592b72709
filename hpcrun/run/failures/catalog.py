"""The known causes of failures, read from the data files of this package.

An entry has: ``id``; ``pattern``, regular expressions (one must match within a line); ``kind``, the area of
the fault (input, program, environment, resource, storage, network, hardware, scheduler, unknown);
``role``, the place of its message in a failure (see :class:`KnownMessage`); ``cause`` and ``remedy``;
``retry``, the effect of another start; ``source``, where the message was seen. ``instead`` (ids) and
``frames`` are optional: if the traceback before a message of these entries matches ``frames``, this entry
takes their place.
"""

import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

from hpcrun.run.failures.literals import Grams, literals

Role = Literal["initiating", "symptom", "consequence", "teardown"]
Retry = Literal["helps", "elsewhere", "unlikely", "never"]

_FOLDER = Path(__file__).with_name("catalog")
_FILES = (
    *(
        "slurm",
        "scripts",
        "launchers",
        "containers",
        "nccl",
        "gpu",
        "memory",
        "files",
        "compile",
        "python",
    ),
    *("torch", "libraries", "signals"),
)
_FAMILIES = ("families", "families-general")
_LEVELS: dict[Role, int] = {"initiating": 3, "symptom": 2, "consequence": 1, "teardown": 0}
RETRY_WORDS: dict[Retry, str] = {
    "helps": "a retry can help",
    "elsewhere": "a retry can help on other nodes",
    "unlikely": "a retry is unlikely to help before this is changed",
    "never": "a retry cannot help before this is changed",
}


@dataclass(frozen=True)
class KnownMessage:
    """A known message and its meaning.

    ``role``: *initiating* messages name a cause by themselves. A *symptom* names what failed, and may follow
    from a failure elsewhere. A *consequence* is about another rank. *Teardown*: a launcher ends
    the other ranks.
    """

    id: str
    pattern: tuple[str, ...]
    kind: str
    role: Role
    cause: str
    remedy: str
    retry: Retry
    source: str
    instead: tuple[str, ...] = ()
    frames: str = ""

    @functools.cached_property
    def required(self) -> tuple[tuple[str, ...], ...]:
        """For each expression, texts in lower case, with at least one in every match; empty if unknown."""
        return tuple(map(literals, self.pattern))

    @property
    def level(self) -> int:
        """The strength of the message as a cause: 3 for initiating, down to 0 for teardown."""
        return _LEVELS[self.role]

    def search(self, text: str) -> "re.Match[str] | None":
        """Find the message in ``text``."""
        patterns = [*self.pattern, *(one for name in self.instead for one in named(name).pattern)]
        found = (_compiled(pattern).search(text) for pattern in patterns)
        return next((match for match in found if match), None)


@functools.cache
def _compiled(pattern: str) -> "re.Pattern[str]":
    return re.compile(pattern)


@functools.cache
def entries() -> tuple[KnownMessage, ...]:
    """Return all entries, the more specific ones first; the files are read only once."""
    return tuple(_read(*_FILES))


@functools.cache
def phrases(name: str) -> "re.Pattern[str]":
    """Return the expressions of ``catalog/phrases.yaml`` with this name as one."""
    return re.compile("|".join(_load("phrases")[name]), re.IGNORECASE)


def is_warning(text: str) -> bool:
    """Return True for a line that its program labels as a warning or as information."""
    return bool(phrases("warning").search(text[:160]) and not phrases("serious").search(text))


def may_match(line: str) -> bool:
    """Return False for a line that no entry can match (cheap)."""
    return bool(_index().found(line.lower()))


# The place of an entry in the order of strength, the entry, and one of its expressions.
_Known = tuple[int, KnownMessage, str]


@functools.cache
def _index() -> Grams[_Known]:
    """Return the expressions of all entries by the texts that their matches contain."""
    # Among equal entries the order stays: the files list specific messages before general ones.
    ordered = sorted(entries(), key=lambda entry: -entry.level)
    return Grams(
        (text, (place, entry, pattern))
        for place, entry in enumerate(ordered)
        for pattern, texts in zip(entry.pattern, entry.required, strict=True)
        for text in texts
    )


@functools.lru_cache(maxsize=4096)
def match(line: str) -> KnownMessage | None:
    """Return the strongest entry that matches within ``line``, or None."""
    possible = sorted(_index().found(line.lower()), key=lambda one: one[0])
    return next((entry for _, entry, pattern in possible if _compiled(pattern).search(line)), None)


def family(line: str, frames: str = "") -> KnownMessage | None:
    """Return the family of an error that no entry knows, such as all errors of a missing package.

    Only a line that is known to be an error has a family; the expressions match ordinary output too.

    Args:
        line: the line of the error.
        frames: the last lines of its traceback, which some families require.
    """
    known = (one for one in _families() if one.search(line))
    return next((one for one in known if _compiled(one.frames).search(frames)), None)


@functools.cache
def _families() -> tuple[KnownMessage, ...]:
    return tuple(_read(*_FAMILIES))


def of_traceback(entry: KnownMessage | None, frames: str) -> KnownMessage | None:
    """Return the entry that is meant by a message of ``entry`` at the end of this traceback."""
    if entry is not None and frames:
        for one in entries():
            if entry.id in one.instead and _compiled(one.frames).search(frames):
                return one
    return entry


def named(name: str) -> KnownMessage:
    """Return the entry with this id."""
    return next(entry for entry in entries() if entry.id == name)


def _load(name: str) -> Any:
    # The parser in C takes a tenth of the time, but some builds of PyYAML lack it.
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return yaml.load((_FOLDER / f"{name}.yaml").read_text(encoding="utf-8"), loader)


def _read(*names: str) -> Iterator[KnownMessage]:
    for name in names:
        for entry in _load(name):
            lists = {key: tuple(entry.get(key, ())) for key in ("pattern", "instead")}
            yield KnownMessage(**{**entry, **lists})
