"""All errors of the Python interface as one exception, with one line for each problem."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from hpcrun.errors import UserError

_P = ParamSpec("_P")
_T = TypeVar("_T")


def refusing(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Let ``function`` raise UserError instead of OSError."""

    @functools.wraps(function)
    def guarded(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except TimeoutError:
            raise
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise UserError(
                f"{place}{error.strerror or error}; check its owner and the free space"
            ) from error

    return guarded
