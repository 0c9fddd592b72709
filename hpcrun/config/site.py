"""The layers below a config: the site's file with its rules, and the user's profile.

A config says what to train, and these files say where, so that a config can move between sites. An
administrator writes the site's file: defaults for every user, and rules about keys and values, which no
profile, config or flag can switch off.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from hpcrun.config.fields import gives
from hpcrun.config.layers import DEFAULTS, Layer, file_layer, locate, merge
from hpcrun.config.problems import ConfigError, Problem, unknown
from hpcrun.config.resolve import resolve
from hpcrun.config.schema import Config, submit_options
from hpcrun.config.shape import kind_at, known_keys
from hpcrun.folders import HOSTS, settings_folder
from hpcrun.printing import say_aside

SITE = "HPCRUN_SITE"
PROFILE = "HPCRUN_PROFILE"
SYSTEM_FILE = Path("/etc/hpcrun/site.yaml")
_SECTIONS = ("job", "restarts")
_RULES = ("forbid", "require")
# sbatch(1): the short form of an option that has the value of a key.
_SHORT = {
    **{"account": "A", "constraint": "C", "cpus-per-task": "c", "exclude": "x"},
    **{"gpus": "G", "nodes": "N", "partition": "p", "qos": "q", "time": "t"},
}


@dataclass(frozen=True)
class Rule:
    """A rule of the site for a key of the config.

    Attributes:
        required: True for ``require``, False for ``forbid``.
        key: the dotted key.
        values: the values that the rule forbids, or that are the only ones allowed; None: the rule is about
            the key itself.
        place: the line of the rule.
        message: the administrator's words for the user; may be empty.
    """

    required: bool
    key: str
    values: Sequence[Any] | None
    place: str
    message: str

    def problem(self, value: Any, plain: Any, where: Callable[[str], str]) -> Problem | None:
        """Return the problem of a config with ``value``; None if the rule allows the value.

        Args:
            plain: the value without the user's files and flags.
            where: the function of :func:`hpcrun.config.locate`.
        """
        words, patterns = _words(value), [_text(item) for item in self.values or ()]
        matched = [word for word in words if any(fnmatchcase(word, one) for one in patterns)]
        if self.required:
            bad = [word for word in words if word not in matched] if patterns else []
            wanted = f"should be {' or '.join(patterns)}" if patterns else "is required"
            text = f"{wanted} at this site ({self.place})"
            if not words:
                return Problem(
                    self.place,
                    self.key,
                    self._with_remedy(f"{wanted} at this site", "give it a value"),
                )
        elif self.values is None:
            bad = [] if value == plain else [""]
            text = f"may not be set at this site ({self.place})"
        else:
            bad = matched
            text = f"is forbidden at this site ({self.place})"
        if not bad:
            return None
        place = where(f"{self.key}.{bad[0]}" if isinstance(value, dict) else self.key)
        if patterns and not self.key.startswith("job.env."):
            text = f"{text}, not {bad[0]}" if self.required else f"{bad[0]} {text}"
        return Problem(place, self.key, self._with_remedy(text, "omit or change it"))

    def hidden(
        self, options: Sequence[str], plain: Sequence[str], where: Callable[[str], str]
    ) -> Problem | None:
        """Return the problem of further ``options`` of sbatch, which would replace the value of the key.

        Args:
            plain: the options without the user's files and flags.
            where: the function of :func:`hpcrun.config.locate`.
        """
        section, _, name = self.key.partition(".")
        mark, _ = submit_options().get(name, (None, ""))
        if section != "job" or mark is None:
            return None
        long = mark.sbatch or name.replace("_", "-")
        for option in options:
            if option not in plain and gives(option, long, _SHORT.get(long, "")):
                text = f"{option}: this site has a rule for {self.key} ({self.place}); use this key"
                return Problem(where("job.sbatch_args"), "job.sbatch_args", text)
        return None

    def _with_remedy(self, text: str, remedy: str) -> str:
        return f"{text}: {self.message}" if self.message else f"{text}; {remedy}"


@dataclass(frozen=True)
class SiteFile:
    """A site's settings for every user.

    Attributes:
        defaults: the values below the user's profile.
        rules: the rules about keys and values.
    """

    defaults: Layer
    rules: Sequence[Rule]

    def check(self, config: Config, layers: Sequence[Layer]) -> None:
        """Check ``config`` against the rules.

        Args:
            config: the resolved config.
            layers: the layers that it comes from, for the places in messages.

        Raises:
            ConfigError: with a line for each rule that the config breaks.
        """
        if not self.rules:
            return
        where = locate(layers)
        values = config.model_dump(mode="json")
        plain = self._plain().model_dump(mode="json")
        found = [
            rule.problem(_at(values, rule.key), _at(plain, rule.key), where) for rule in self.rules
        ]
        own = plain["job"]["sbatch_args"]
        found += [rule.hidden(config.job.sbatch_args, own, where) for rule in self.rules]
        if problems := [problem for problem in found if problem is not None]:
            raise ConfigError(problems)

    def _plain(self) -> Config:
        try:
            # A default may contradict another default that every user's config replaces.
            return Config.model_validate(self.defaults.values)
        except ValidationError:
            return resolve([self.defaults])


def read_site(environ: Mapping[str, str]) -> SiteFile:
    """Read the site's files: ``/etc/hpcrun/site.yaml``, then the file that ``$HPCRUN_SITE`` names.

    A default of the second file replaces that of the first. The rules of both files apply.

    Args:
        environ: the environment, with ``HPCRUN_SITE``.

    Raises:
        ConfigError: a file cannot be read, or is not a site's file.
    """
    paths = [SYSTEM_FILE] if SYSTEM_FILE.exists() else []
    if named := environ.get(SITE):
        path = Path(named)
        if not path.is_file():
            words = f"no such file {path}; correct or unset the variable"
            raise ConfigError([Problem(f"${SITE}", "", words)])
        paths += [path] if path not in paths else []
    layers, rules = [], list[Rule]()
    for path in paths:
        layer = file_layer(path)
        _refuse_others(
            layer,
            [*_SECTIONS, *_RULES, "messages"],
            f"a site's file may only contain {', '.join([*_SECTIONS, *_RULES])} and messages",
        )
        rules += _rules(layer)
        layers.append(_only(layer, _SECTIONS))
    return SiteFile(merge(layers), rules)


def _rules(layer: Layer) -> Iterator[Rule]:
    sections = {name: layer.values.get(name) or {} for name in (*_RULES, "messages")}
    problems = [
        Problem(layer.where[name], name, "should be keys, such as `job.partition: [debug]`")
        for name, section in sections.items()
        if not isinstance(section, dict)
    ]
    if problems:
        raise ConfigError(problems)
    known = list(known_keys(Config))
    ruled = {key for name in _RULES for key in sections[name]}
    for name, section in sections.items():
        for key in section:
            place = layer.where[f"{name}.{key}"]
            kind = kind_at(key.split("."))
            if kind == "unknown" or (key not in known and not key.startswith("job.env.")):
                problems.append(Problem(place, f"{name}: {key}", unknown(key, known)))
            elif kind == "section":
                words = f"is a section; name a key of it, such as {key}.KEY"
                problems.append(Problem(place, f"{name}: {key}", words))
            elif name == "messages" and key not in ruled:
                words = "no rule of this file is about this key; add it to forbid or require"
                problems.append(Problem(place, f"{name}: {key}", words))
    if problems:
        raise ConfigError(problems)
    for name in _RULES:
        for key, values in sections[name].items():
            yield Rule(
                required=name == "require",
                key=key,
                values=values if values is None or isinstance(values, list) else [values],
                place=layer.where[f"{name}.{key}"],
                message=str(sections["messages"].get(key) or ""),
            )


def _only(layer: Layer, sections: Collection[str]) -> Layer:
    return Layer(
        {name: value for name, value in layer.values.items() if name in sections},
        {key: place for key, place in layer.where.items() if key.partition(".")[0] in sections},
    )


def _refuse_others(layer: Layer, sections: Collection[str], text: str) -> None:
    wrong = [
        Problem(layer.where.get(key, DEFAULTS), key, text)
        for key in layer.values
        if key not in sections
    ]
    if wrong:
        raise ConfigError(wrong)


def _at(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values.get(part) if isinstance(values, dict) else None
    return values


def _words(value: Any) -> list[str]:
    """Return the words of a value that rules compare: items, names of variables, names between commas."""
    if isinstance(value, list | dict):
        return [_text(item) for item in value]
    return [] if value is None else [word for word in _text(value).split(",") if word]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def profile_path(environ: Mapping[str, str], wanted: str | None = None) -> Path | None:
    """Return the path of the site profile that applies, or None.

    Without a choice, ``default.yaml`` in ``~/.config/hpcrun`` (``$XDG_CONFIG_HOME/hpcrun``) applies, or the
    only profile in this folder. Of several other profiles none applies, and a line says so.

    Args:
        environ: the environment, with ``HPCRUN_PROFILE``.
        wanted: the value of ``--profile``; None: ``$HPCRUN_PROFILE``. The value is a path, the name of a file
            in the folder without suffix, or empty for no profile.

    Raises:
        ConfigError: the chosen profile does not exist.
    """
    folder = settings_folder(environ)
    asked = wanted if wanted is not None else environ.get(PROFILE)
    if asked is not None:
        return _named(asked, folder, "--profile" if wanted is not None else f"${PROFILE}")
    profiles = _profiles(folder)
    if (folder / "default.yaml") in profiles:
        return folder / "default.yaml"
    if len(profiles) > 1:
        # A second profile ends the automatic choice of the first.
        say_aside(
            f"hpcrun: none of the profiles in {folder} applies "
            f"({', '.join(profile.stem for profile in profiles)}): choose with --profile or ${PROFILE}, "
            "or rename one to default.yaml; --profile '' chooses none"
        )
    return profiles[0] if len(profiles) == 1 else None


def profile_layer(path: Path) -> Layer:
    """Read the profile ``path``.

    Raises:
        ConfigError: the file cannot be read, or has other sections than ``job`` and ``restarts``.
    """
    layer = file_layer(path)
    _refuse_others(
        layer,
        _SECTIONS,
        f"a profile says where to run and may only contain {' and '.join(_SECTIONS)}; move this key to the "
        "config",
    )
    return layer


def _profiles(folder: Path) -> list[Path]:
    found = sorted(folder.glob("*.yaml")) if folder.is_dir() else []
    return [path for path in found if path.name != HOSTS]


def _named(asked: str, folder: Path, place: str) -> Path | None:
    if not asked:
        return None
    path = Path(asked).expanduser() if "/" in asked or "." in asked else folder / f"{asked}.yaml"
    if path.is_file():
        return path
    known = [profile.stem for profile in _profiles(folder)]
    there = f"available: {', '.join(known)}" if known else f"{folder} has no profiles"
    raise ConfigError([Problem(place, "", f"no profile {path}; {there}")])
