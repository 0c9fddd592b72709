"""One axis of a grid, as ``--sweep`` has it: ``train.lr=1e-4,3e-4`` or ``seed=0:5``."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

from hpcrun.api.sweeps.rows import Row, RowBlock, SweepValue, refusal
from hpcrun.config import ConfigError, Problem, override_layer
from hpcrun.config.shape import kind_at

OPTION = "--sweep"
_RANGE = re.compile(r"(-?\d+):(-?\d+)(?::(-?\d+))?")
_MOST = 100_000
_OPENING, _CLOSING = "[{(", "]})"


def read_axes(options: Sequence[str]) -> list[RowBlock]:
    """Return a block for each ``KEY=VALUES``.

    ``VALUES`` are values separated by commas, or ranges of whole numbers ``first:end`` or ``first:end:step``;
    the end is excluded.

    Raises:
        ConfigError: an option is not KEY=VALUES, or a key is given twice.
    """
    blocks = [_read_axis(option) for option in options]
    keys = [block.keys[0] for block in blocks]
    for key in keys:
        if keys.count(key) > 1:
            raise refusal(OPTION, key, "is given twice; write all its values in one --sweep")
    return blocks


def _read_axis(option: str) -> RowBlock:
    key, equals, text = option.partition("=")
    key = key.strip()
    if not equals or not key:
        raise refusal(OPTION, option, "write an axis as KEY=VALUES, such as train.lr=1e-4,3e-4")
    if not text.strip():
        raise refusal(OPTION, key, "has no values; write them with commas: 1e-4,3e-4")
    rows: list[Row] = [{key: value} for word in _split(text) for value in _values(key, word)]
    if not rows:
        raise refusal(
            OPTION, key, f"{text} is an empty range; the end is excluded: 0:3 means 0, 1, 2"
        )
    return RowBlock(rows, OPTION)


def _split(text: str) -> Iterator[str]:
    """Split at the commas outside brackets and quotes."""
    depth, quote, word = 0, "", ""
    for letter in text:
        if letter == "," and not depth and not quote:
            yield word
            word = ""
            continue
        word += letter
        if quote or letter in "'\"":
            quote = "" if letter == quote else quote or letter
        else:
            depth += (letter in _OPENING) - (letter in _CLOSING)
    yield word


def _values(key: str, word: str) -> Iterator[SweepValue]:
    span = _RANGE.fullmatch(word.strip())
    if span is None or kind_at(key.split(".")) == "text":
        yield SweepValue(read_value(key, word), word)
        return
    numbers = range_of(key, word, [int(part) for part in span.groups() if part is not None])
    yield from (SweepValue(number, str(number)) for number in numbers)


def range_of(key: str, shown: str, parts: Sequence[int]) -> range:
    """Return the range of ``first, end[, step]``.

    Raises:
        ConfigError: the step is 0, or the range has too many numbers.
    """
    if len(parts) == 3 and parts[2] == 0:
        raise refusal(OPTION, key, f"{shown} has step 0; use another step")
    numbers = range(*parts)
    if len(numbers) > _MOST:
        raise refusal(OPTION, key, f"{shown} has more than {_MOST} numbers; use a shorter range")
    return numbers


def read_value(key: str, word: str) -> Any:
    """Read ``word`` as the value of an override ``key=word``.

    Raises:
        ConfigError: the word is not valid YAML, or the key is unknown.
    """
    try:
        value: Any = override_layer([f"{key}={word}"]).values
    except ConfigError as error:
        raise ConfigError([Problem(OPTION, it.key, it.text) for it in error.problems]) from None
    for part in key.split("."):
        value = value[part.strip()]
    return value
