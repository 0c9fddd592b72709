"""Checks of one value against the values that its variable takes."""

import re

from hpcrun.network.nccl.rules import Variable

# The numbers that strtoll(…, 0) accepts, with which NCCL reads them.
_NUMBER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)")
_LISTS = ("devices", "interfaces", "exact-interfaces")
_PER_PROCESS = ("%p", "%h")
_TRAILING_NUMBER = re.compile(r"[A-Za-z_]+\d*[A-Za-z_]+(\d)|[A-Za-z]+(\d)")


def number(value: str) -> int | None:
    """Return the number that NCCL reads from ``value``; None if it is not a number."""
    text = value.strip()
    if not _NUMBER.fullmatch(text):
        return None
    try:
        return int(text, 0)
    except ValueError:
        # "010" is octal for strtoll and an error for Python.
        return int(text, 8) if re.fullmatch(r"[+-]?0[0-7]+", text) else None


def wrong_value(variable: Variable, value: str) -> str | None:
    """Return the problem of ``value``, with the valid values; None without a problem.

    An empty value is valid: for NCCL an empty variable is not set.
    """
    if value == "":
        return None
    if variable.type in _LISTS and len(value.split()) > 1:
        return f"has a space, which counts as part of a name; write {''.join(value.split())}"
    if variable.type == "flag":
        return None if number(value) in (0, 1) else f"should be 0 or 1, not {value}"
    if variable.min is not None or variable.max is not None:
        return _wrong_number(variable, value)
    if variable.type == "distance":
        return _wrong_distance(variable, value)
    if variable.type == "selection":
        return _wrong_selection(variable, value)
    if variable.choices and value.upper() not in map(str.upper, variable.choices):
        return f"should be {_one_of(variable.choices)}, not {value}"
    return None


def _wrong_number(variable: Variable, value: str) -> str | None:
    found = number(value)
    low, high = variable.min, variable.max
    if found is None:
        return f"should be a whole number, not {value}; the default is used"
    if low is not None and high is not None and not low <= found <= high:
        return f"should be {low} to {high}, not {value}"
    if low is not None and found < low:
        return f"should be at least {low}, not {value}"
    return None


def _wrong_distance(variable: Variable, value: str) -> str | None:
    if value.upper() in variable.choices or number(value) is not None:
        return None
    return f"should be {_one_of(variable.choices)}, not {value}"


def is_old_distance(variable: Variable, value: str) -> bool:
    """Return True if a distance is given as a number, which names another distance in another version."""
    return variable.type == "distance" and number(value) is not None


def _wrong_selection(variable: Variable, value: str) -> str | None:
    """Check ``ring,tree`` and, since 2.24, ``allreduce:^tree;broadcast:ring``."""
    known = {choice.lower() for choice in variable.choices}
    for part in value.split(";"):
        for word in part.rpartition(":")[2].removeprefix("^").split(","):
            if word.strip().lower() not in known:
                return f"has {word.strip() or 'an empty name'!r}; known are {', '.join(variable.choices)}"
    return None


def prefix_trap(variable: Variable, value: str) -> str | None:
    """Return which further devices or interfaces a name matches without ``=``; None if there are none.

    NCCL matches prefixes: ``mlx5_1`` is also mlx5_10 to mlx5_19. It reads at most 32 devices, so that
    the numbers 1 to 3 are the ones that can match two-digit numbers.
    """
    if variable.type not in ("devices", "interfaces") or not value:
        return None
    names = value.removeprefix("^")
    if names.startswith("="):
        return None
    for name in names.split(","):
        bare = name.partition(":")[0].strip()
        found = _TRAILING_NUMBER.fullmatch(bare)
        digit = found and (found[1] or found[2])
        if digit in ("1", "2", "3"):
            last = f"{bare}9" if digit in ("1", "2") else f"{bare}1"
            sign = "^=" if value.startswith("^") else "="
            return f"{bare} also matches {bare}0 to {last}; write {sign}{names}"
    return None


def shared_file(variable: Variable, value: str) -> str | None:
    """Return why all processes would write to one file; None if each process has a separate file."""
    if variable.type != "file-per-process" or not value or value.startswith("/dev/std"):
        return None
    missing = [field for field in _PER_PROCESS if field not in value]
    if not missing:
        return None
    return f"all processes would write to the same file; add {' and '.join(missing)} to the name"


def _one_of(choices: tuple[str, ...]) -> str:
    return ", ".join(choices[:-1]) + f" or {choices[-1]}"
