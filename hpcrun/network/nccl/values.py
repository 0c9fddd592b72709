"""The checks of a value by itself: how the library reads it, and which values it takes."""

import re

from hpcrun.network.nccl.rules import Variable, concerns_nccl

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
    if variable.type in _LISTS:
        return _wrong_list(variable, value)
    if variable.type == "flag":
        found = number(value)
        if found in (0, 1) or value.lower() in _words_of(variable):
            return None
        reads = f"; NCCL reads {_leading(value)}" if found is None and _by_strtoll(variable) else ""
        return f"should be 0 or 1, not {value}{reads}"
    if variable.type == "number" or variable.min is not None or variable.max is not None:
        return _wrong_number(variable, value)
    if value != value.strip() and variable.type in ("distance", "exact", "selection"):
        return f"has a blank at its begin or end, which counts; write {value.strip()}"
    if variable.type in ("distance", "exact"):
        return _wrong_exact(variable, value)
    if variable.type == "selection":
        return _wrong_selection(variable, value)
    if variable.type == "set":
        return _wrong_set(variable, value)
    # NCCL removes blanks since 2.30.
    text = value.strip()
    if variable.form is not None:
        fits = re.fullmatch(variable.form, text, re.IGNORECASE) is not None
    else:
        fits = not variable.choices or text.upper() in map(str.upper, variable.choices)
    more = f"; {variable.wrong}" if variable.wrong else ""
    return None if fits else f"should be {_one_of(variable.choices)}, not {value}{more}"


def is_harmless(variable: Variable, value: str) -> bool:
    """Return True if a wrong value has the effect of no value, or of the number that was meant: ``22s``."""
    if variable.harmless:
        return True
    if not _by_strtoll(variable) or variable.type == "flag" or number(value) is not None:
        return False
    read = _DIGITS.match(value.strip())
    scaled = read and re.match(
        r"\s*([kmgt]i?b?\b|e\+?\d|\*|\.\d*[1-9])", value.strip()[read.end() :], re.I
    )
    return bool(read) and not scaled and _wrong_number(variable, str(_leading(value))) is None


def padded(value: str) -> bool:
    """Return True if a blank is at the begin or end of ``value``."""
    return value != value.strip() and value.strip() != ""


def _wrong_list(variable: Variable, value: str) -> str | None:
    """Check a list of interfaces or devices, for NCCL prefixes, for gloo full names."""
    if re.search(r"\s", value):
        return f"has a space, which counts as part of a name; write {''.join(value.split())}"
    pattern = re.search(r"[*?\[\]{}]", value)
    if variable.type == "exact-interfaces":
        if value.startswith(("^", "=")) or pattern:
            sign = pattern[0] if pattern else value[0]
            return f"has {sign!r}: gloo takes full names of interfaces, without ^, = or a pattern, and fails"
        return None
    if pattern:
        bare = re.split(r"[*?\[\]{}]", value)[0]
        return f"has {pattern[0]!r}: names are prefixes, and NCCL knows no patterns; write {bare}"
    if re.search(r",[\^=]", value):
        return "has ^ or = inside the list; it counts only at the begin, for the whole list"
    return None


def _by_strtoll(variable: Variable) -> bool:
    """Return True if the library reads a number by its leading digits, and text as 0."""
    return variable.library in ("nccl", "rccl") or variable.source == "sharp"


_DIGITS = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)")


def _leading(value: str) -> int:
    """Return the number that strtoll() reads: of the leading digits, 0 without any."""
    found = _DIGITS.match(value.strip())
    return (number(found[0]) or 0) if found else 0


def _words_of(variable: Variable) -> tuple[str, ...]:
    """Return the words that the library takes for 0 and 1; NCCL reads every word as 0."""
    if variable.library == "torch" and concerns_nccl(variable.name):
        return _C10D_WORDS
    return ("true", "false") if variable.name.startswith("OFI_") else ()


# c10d's getCvarBool().
_C10D_WORDS = ("y", "yes", "t", "true", "n", "no", "f", "false")


def _wrong_number(variable: Variable, value: str) -> str | None:
    found = number(value)
    low, high = variable.min, variable.max
    if found is None:
        text = f"should be a whole number, not {value}"
        if not _by_strtoll(variable):
            return text
        digits = "" if _DIGITS.match(value.strip()) else ", because it does not begin with a digit"
        return f"{text}; NCCL reads {_leading(value)}{digits}"
    if low is not None and high is not None and not low <= found <= high:
        return f"should be {low} to {high}, not {value}"
    if low is not None and found < low:
        return f"should be at least {low}, not {value}"
    if high is not None and found > high:
        return f"should be at most {high}, not {value}"
    return None


def _wrong_exact(variable: Variable, value: str) -> str | None:
    """Check a value that NCCL compares with strcmp(), so that its case counts."""
    if value in variable.choices or is_old_distance(variable, value):
        return None
    case = "; NCCL does not ignore the case" if value.upper() in variable.choices else ""
    return f"should be {_one_of(variable.choices)}, not {value}{case}"


def is_old_distance(variable: Variable, value: str) -> bool:
    """Return True if a distance is given as a number, which names another distance in another version."""
    return variable.type == "distance" and number(value) is not None


_FUNCTIONS = ("allgather", "allreduce", "broadcast", "reduce", "reducescatter")


def _wrong_selection(variable: Variable, value: str) -> str | None:
    """Check ``ring,tree`` and, since 2.24, ``ring;allreduce:^tree``.

    NCCL skips an empty word, and removes no blank.
    """
    known = {choice.lower() for choice in variable.choices}
    for position, part in enumerate(filter(None, value.split(";"))):
        function, colon, names = part.rpartition(":")
        if colon and function.lower() not in _FUNCTIONS:
            return f"has {function!r} before a colon; known are {', '.join(_FUNCTIONS)}"
        if position and not colon:
            return f"has {part!r} without a collective: only the first part may have none"
        for word in filter(None, names.removeprefix("^").split(",")):
            if word.lower() not in known:
                return f"has {word!r}; known are {', '.join(variable.choices)}"
    return None


def _wrong_set(variable: Variable, value: str) -> str | None:
    """Check ``INIT,NET`` or ``^INIT,NET``. NCCL skips an empty word, and removes blanks."""
    for word in filter(None, map(str.strip, value.removeprefix("^").split(","))):
        if word.upper() not in variable.choices:
            return f"has {word!r}; known are {', '.join(variable.choices)}"
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
