"""The rows of a sweep: the product of its blocks, without the rows that a condition excludes."""

import itertools
import math

from hpcrun.api.sweeps.conditions import holds, parsed
from hpcrun.api.sweeps.rows import Row, SweepRequest, canonical, refusal, text_of

MOST = 100_000
"""More elements than any cluster takes as one sweep."""


def expand(request: SweepRequest) -> list[Row]:
    """Return the rows of all elements; the keys of the last block change fastest.

    Raises:
        ConfigError: a key is in two blocks, two rows are equal, a condition is wrong, or no row is left.
    """
    _refuse_two_places(request)
    count = math.prod(len(block.rows) for block in request.blocks)
    if count > MOST:
        raise refusal("--sweep", "", f"{count} runs are more than {MOST}; use fewer values")
    rows = [
        _joined(parts) for parts in itertools.product(*(block.rows for block in request.blocks))
    ]
    for condition in request.conditions:
        expression = parsed(condition)
        rows = [row for row in rows if holds(condition, expression, row)]
    if not rows:
        raise refusal("--sweep", "", "no run is left; loosen the conditions under `where`")
    _refuse_equal(request, rows)
    return rows


def _refuse_two_places(request: SweepRequest) -> None:
    places: dict[str, str] = {}
    for block in request.blocks:
        for key in block.keys:
            if key in places:
                raise refusal(
                    block.place, key, f"{places[key]} has this key too; keep one of the two"
                )
            places[key] = block.place


def _joined(parts: tuple[Row, ...]) -> Row:
    return {key: value for part in parts for key, value in part.items()}


def _refuse_equal(request: SweepRequest, rows: list[Row]) -> None:
    seen: set[str] = set()
    for row in rows:
        found = canonical({key: given.value for key, given in row.items()})
        if found in seen:
            told = " ".join(f"{key}={text_of(given.value)}" for key, given in row.items())
            first = next(iter(row))
            raise refusal(request.place_of(first), told, "is given twice; remove one of the two")
        seen.add(found)
