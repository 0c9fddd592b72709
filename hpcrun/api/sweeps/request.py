"""The sweep that a Python program requests."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from hpcrun.api.sweeps.file import read_sweep_file
from hpcrun.api.sweeps.rows import RowBlock, SweepRequest, plain
from hpcrun.errors import UserError

_PLACE = "sweep="


def sweep_request(
    axes: Mapping[str, Iterable[Any]] | None, file: str | os.PathLike[str] | None
) -> SweepRequest:
    """Return the product of the sweep in ``file`` and of ``axes``: values by dotted key.

    Raises:
        UserError: an axis has no values, or the file is wrong.
    """
    request = read_sweep_file(Path(file)) if file is not None else SweepRequest()
    if axes is not None and not isinstance(axes, Mapping):
        raise UserError(f"{_PLACE}: give a dict, such as {_PLACE}{{'seed': range(3)}}")
    blocks = [*request.blocks, *(_block(key, values) for key, values in (axes or {}).items())]
    if not blocks:
        raise UserError(f"{_PLACE}: has no key; give values, such as {_PLACE}{{'seed': range(3)}}")
    return SweepRequest(blocks, request.conditions)


def _block(key: object, values: object) -> RowBlock:
    if not isinstance(key, str) or not all(part.strip() for part in key.split(".")):
        raise UserError(f"{_PLACE}: {key!r} is not a key; write it as 'section.key'")
    if isinstance(values, str | bytes | Mapping) or not isinstance(values, Iterable):
        raise UserError(f"{_PLACE}: {key}: give a list of values, such as [1e-4, 3e-4]")
    found = [_plain(key, value) for value in values]
    if not found:
        raise UserError(f"{_PLACE}: {key}: has no values; give at least one")
    return RowBlock([{key: plain(value)} for value in found], _PLACE)


def _plain(key: str, value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    # A number of numpy.
    known = value.item() if hasattr(value, "item") else value
    if isinstance(known, list | tuple):
        return [_plain(key, part) for part in known]
    if isinstance(known, float):
        return _without_noise(known)
    if known is None or isinstance(known, str | int | bool):
        return known
    raise UserError(f"{_PLACE}: {key}: {value!r} is not a value of a config; give text or a number")


def _without_noise(number: float) -> float:
    """Remove the rounding error of a computed value: return 0.02 for 0.020000000000000004."""
    near = float(f"{number:.15g}")
    # A number such as 1/3 needs all its digits, and stays unchanged.
    return near if len(repr(near)) < len(repr(number)) - 3 else number
