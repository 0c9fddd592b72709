"""Placeholders in a command: ``{lr}`` or ``{train.lr}`` becomes the value of the element."""

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence

from hpcrun.api.sweeps.rows import Row
from hpcrun.errors import UserError

# ``{{x}}`` is the text ``{x}``, as in a format of Python.
_PLACE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.-]*)\}")


def names_in(command: Sequence[str]) -> list[str]:
    """Return the placeholders of ``command``, each once."""
    found = (match[1] for word in command for match in _PLACE.finditer(word))
    return list(dict.fromkeys(name for name in found if name))


def keys_of(names: Iterable[str], keys: Sequence[str]) -> dict[str, str]:
    """Return the key of each placeholder: the full key, or the only one with that last component.

    Raises:
        UserError: a placeholder has no key, or two.
    """
    return {name: _key_of(name, keys) for name in names}


def filled(command: Sequence[str], row: Row, keys: Mapping[str, str]) -> list[str]:
    """Return ``command`` with the values of ``row``, as the user wrote them."""

    def value(match: "re.Match[str]") -> str:
        return row[keys[match[1]]].text if match[1] else match[0][0]

    return [_PLACE.sub(value, word) for word in command]


def _key_of(name: str, keys: Sequence[str]) -> str:
    if name in keys:
        return name
    same = [key for key in keys if key.rpartition(".")[2] == name]
    if len(same) == 1:
        return same[0]
    if same:
        raise UserError(
            f"after --: {{{name}}} may be {' or '.join(same)}; write the whole key: {{{same[0]}}}"
        )
    known = [*keys, *(key.rpartition(".")[2] for key in keys)]
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    hint = f"did you mean {{{near[0]}}}?" if near else f"the sweep has {', '.join(keys)};"
    raise UserError(
        f"after --: {{{name}}} is not a key of the sweep; {hint} for plain braces write {{{{{name}}}}}"
    )
