"""The config of each element of a sweep, checked, and its text."""

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hpcrun.api.submission.choose_config import SubmitRequest, with_task
from hpcrun.api.sweeps.request import Row, SweepRequest, refusal
from hpcrun.config import Config, Layer, flag_layer, resolve
from hpcrun.config.config import merge
from hpcrun.config.conflicts import idle_keys
from hpcrun.config.schema import kind_at, known_keys
from hpcrun.config.site import read_site
from hpcrun.config.writer import dumped
from hpcrun.errors import UserError

# They decide where and how a run is kept, for all elements.
_NOT_SWEPT = ("name", "command", "job.executor", "watch.notify")
# What hpcrun does for a command.
_OF_ALL_RUNS = ("job", "restarts")


@dataclass(frozen=True)
class Element:
    """An element of the sweep: its values by dotted key, its config, and the text of the config.

    ``template``: the command with its placeholders; empty without a placeholder.
    """

    values: Mapping[str, object]
    config: Config
    text: str
    template: Sequence[str] = ()


def element_configs(
    request: SubmitRequest, sweep: SweepRequest, rows: Sequence[Row], layers: Sequence[Layer]
) -> list[Element]:
    """Return the elements of ``rows``, in their order; ``layers``: the sources of their common config.

    Raises:
        UserError: a key is unknown, has no effect, or may not differ between elements; or a value is wrong.
    """
    keys = list(rows[0])
    places = {key: sweep.place_of(key) for key in keys}
    if "task" in keys and request.file is None:
        raise refusal(places["task"], "task", "needs a config for all tasks; give it with -c")
    _refuse_fixed(keys, places, layers)
    command = [*request.command]
    placeholders = placeholder_keys(command, keys)
    if command:
        _refuse_unused(keys, places, placeholders)
    sections = {key.partition(".")[0] for key in known_keys(Config)}
    in_config = [key for key in keys if not command or key.partition(".")[0] in sections]
    texts: dict[tuple[str, str], str] = {}
    elements: list[Element] = []
    site = read_site(os.environ)
    for row in rows:
        given = {key: (row[key].value, places[key]) for key in in_config}
        mine = [*layers, flag_layer(given)]
        if placeholders:
            words = filled(command, row, placeholders)
            mine.append(flag_layer({"command": (words, "after --")}))
        config = resolve(mine)
        for key, words_of_key in idle_keys(config, given):
            raise refusal(places[key], key, f"{words_of_key}, or list the runs in a sweep file")
        config = with_task(config, mine)
        site.check(config, mine)
        values = {key: value.value for key, value in row.items()}
        template = command if placeholders else ()
        elements.append(Element(values, config, _text(config, texts), template))
    return elements


def _text(config: Config, texts: dict[tuple[str, str], str]) -> str:
    """Return the YAML text of ``config``; ``texts``: the sections that other elements have too.

    A text takes milliseconds, and a sweep may have a thousand elements.
    """
    for name, value in (values := config.model_dump()).items():
        mark = (name, repr(value))
        if mark not in texts:
            texts[mark] = dumped({name: value})
    return "".join(texts[name, repr(value)] for name, value in values.items())


def _refuse_fixed(keys: Sequence[str], places: dict[str, str], layers: Sequence[Layer]) -> None:
    given = merge(layers).where
    for key in keys:
        words = None
        if key in _NOT_SWEPT:
            words = "is the same for all runs of a sweep; give it once"
        elif key == "job.env" or key.startswith("job.env."):
            words = "is masked in all tables; write `env NAME={value}` before the command, and sweep value"
        elif kind_at(key.split(".")) == "section":
            words = "is a section; name a key of it, such as train.lr"
        elif given.get(key) == "command line" or given.get(key, "").startswith("--"):
            words = "is also given for all runs; remove one of the two"
        if words:
            raise refusal(places[key], key, words)


def _refuse_unused(
    keys: Sequence[str], places: dict[str, str], placeholders: dict[str, str]
) -> None:
    for key in keys:
        if key not in placeholders.values() and key.partition(".")[0] not in _OF_ALL_RUNS:
            last = key.rpartition(".")[2]
            words = f"has no effect: the command does not use it; write {{{last}}} in it"
            raise refusal(places[key], key, words)


# ``{{x}}`` is the text ``{x}``, as in a format of Python.
_PLACE = re.compile(r"\{\{|\}\}|\{([A-Za-z_][\w.-]*)\}")


def placeholder_keys(command: Sequence[str], keys: Sequence[str]) -> dict[str, str]:
    """Return the key of each placeholder of ``command``: its name, or the only key with that last component.

    Raises:
        UserError: a placeholder has no key, or two.
    """
    names = [match[1] for word in command for match in _PLACE.finditer(word) if match[1]]
    return {name: _key_of(name, keys) for name in names}


def filled(command: Sequence[str], row: Row, keys: Mapping[str, str]) -> list[str]:
    """Return ``command`` with the values of ``row``, as the user wrote them."""

    def value(match: "re.Match[str]") -> str:
        return row[keys[match[1]]].text if match[1] else match[0][0]

    return [_PLACE.sub(value, word) for word in command]


def _key_of(name: str, keys: Sequence[str]) -> str:
    same = [name] if name in keys else [key for key in keys if key.rpartition(".")[2] == name]
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
