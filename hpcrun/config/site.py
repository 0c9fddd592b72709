"""The layers below a config: the site's file with its rules, and the user's profile.

A config says what to train, and these files say where, so that a config can move between sites. An
administrator writes the site's file: defaults for every user, and rules about keys and values, which no
profile, config or flag can switch off.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from hpcrun import folders
from hpcrun.config.config import DEFAULTS, Config, locate, merge, resolve
from hpcrun.config.problems import ConfigError, Problem
from hpcrun.config.reader import Layer, file_layer
from hpcrun.config.rules import EXECUTOR, SECTIONS, Rule, read_rules, value_at

_SECTIONS = ("job", "restarts")


@dataclass(frozen=True)
class SiteFile:
    """A site's settings for every user.

    Attributes:
        defaults: the values below the user's profile.
        rules: the rules about keys and values.
    """

    defaults: Layer
    rules: Sequence[Rule]

    def check(self, config: Config, layers: Sequence[Layer], executor: str | None = None) -> None:
        """Check ``config`` against the rules.

        Args:
            config: the resolved config.
            layers: the layers that it comes from, for the places in messages.
            executor: the executor that ``auto`` has chosen; None: rules about its values wait for the choice.

        Raises:
            ConfigError: with a line for each rule that the config breaks.
        """
        if not self.rules:
            return
        where = locate(layers)
        values = config.model_dump(mode="json")
        plain = self._plain().model_dump(mode="json")
        found = []
        for rule in self.rules:
            value = value_at(values, rule.key)
            if rule.key == EXECUTOR and rule.values is not None and value == "auto":
                value = executor
                if value is None:
                    continue
            found.append(rule.problem(value, value_at(plain, rule.key), where))
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
    paths = [folders.SITE_FILE] if folders.SITE_FILE.exists() else []
    if (named := environ.get(folders.SITE)) is not None:
        path = Path(named)
        if not path.is_file():
            words = f"no such file {path}; correct or unset the variable"
            if not named:
                words = "is empty; name the site's file, or unset the variable"
            raise ConfigError([Problem(f"${folders.SITE}", "", words)])
        paths += [path] if path not in paths else []
    layers, rules = [], list[Rule]()
    for path in paths:
        layer = file_layer(path)
        _refuse_others(
            layer,
            [*_SECTIONS, *SECTIONS, "messages"],
            f"a site's file may only contain {', '.join([*_SECTIONS, *SECTIONS])} and messages",
        )
        rules += read_rules(layer)
        layers.append(_only(layer, _SECTIONS))
    return SiteFile(merge(layers), rules)


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


def profile_path(environ: Mapping[str, str], wanted: str | None = None) -> Path | None:
    """Return the path of the site profile that applies, or None.

    Without a choice, ``default.yaml`` in ``~/.config/hpcrun`` (``$XDG_CONFIG_HOME/hpcrun``) applies.

    Args:
        environ: the environment, with ``HPCRUN_PROFILE``.
        wanted: the value of ``--profile``; None: ``$HPCRUN_PROFILE``. The value is a path, the name of a file
            in the folder without suffix, or empty for no profile.

    Raises:
        ConfigError: the chosen profile does not exist.
    """
    asked = wanted if wanted is not None else environ.get(folders.PROFILE)
    if asked is not None:
        place = "--profile" if wanted is not None else f"${folders.PROFILE}"
        return _named(asked, folders.settings_folder(environ), place)
    default = folders.default_profile(environ)
    return default if default.is_file() else None


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


def _named(asked: str, folder: Path, place: str) -> Path | None:
    if not asked:
        return None
    path = Path(asked).expanduser() if "/" in asked or "." in asked else folder / f"{asked}.yaml"
    if path.is_file():
        return path
    known = sorted(
        profile.stem for profile in folder.glob("*.yaml") if profile.name != folders.HOSTS
    )
    there = f"available: {', '.join(known)}" if known else f"{folder} has no profiles"
    raise ConfigError([Problem(place, "", f"no profile {path}; {there}")])
