"""Settings that sites document for their network, each preset with its page."""

import difflib
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml

from hpcrun.errors import NetworkError
from hpcrun.network.nccl.advice.advise import Advice

_FILE = Path(__file__).parents[1] / "rules" / "presets.yaml"


@dataclass(frozen=True)
class Preset:
    """A site's settings. ``read``: the month in which the site's page was read."""

    name: str
    site: str
    source: str
    read: str
    env: Mapping[str, str]


@functools.cache
def presets() -> Mapping[str, Preset]:
    """Return all presets by name."""
    entries = yaml.safe_load(_FILE.read_text(encoding="utf-8"))
    return {entry["name"]: Preset(**(entry | {"read": str(entry["read"])})) for entry in entries}


def with_preset(lines: list[Advice], name: str) -> list[Advice]:
    """Return ``lines`` with the settings of a site, which replace advice for the same variable.

    Raises:
        NetworkError: there is no such preset.
    """
    if name not in presets():
        near = difflib.get_close_matches(name, presets(), n=1)
        hint = f"did you mean {near[0]}?" if near else f"there is: {', '.join(presets())}"
        raise NetworkError(f"--site {name}: there is no such preset; {hint}")
    preset = presets()[name]
    reason = f"{preset.site}, read {preset.read}"
    chosen = [Advice(key, value, reason, preset.source) for key, value in preset.env.items()]
    return chosen + [line for line in lines if line.name is None or line.name not in preset.env]
