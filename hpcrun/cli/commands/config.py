"""Show the config that a command line results in, with every default; the
place of each value that is not a default; or the schema for editors.
  hpcrun config show -c configs/gpt.yaml train.lr=1e-3
  hpcrun config where -c configs/gpt.yaml train.lr=1e-3
  hpcrun config schema > hpcrun.schema.json
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrun.api.submission.choose_config import choose_config, config_layers
from hpcrun.cli.arguments import request_of, require_subcommand
from hpcrun.cli.output import aligned, print_json
from hpcrun.config import Layer, json_schema, masked_values, to_yaml
from hpcrun.config.config import merge
from hpcrun.printing import say

_WAYS = ("show", "where", "schema")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "hpcrun config show|where|schema [-c FILE] [--json] [key.sub=value ...]"
    parser.add_argument("what", metavar="show|where|schema", nargs="?", help="what to print")
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="YAML or JSON config")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="config overrides")
    parser.add_argument(
        "--profile", metavar="NAME", help="site profile: a name or a path; '' for none"
    )
    parser.add_argument("--json", action="store_true", help="JSON instead of YAML")


def run(arguments: argparse.Namespace) -> int:
    """Print the config or the schema."""
    what = require_subcommand("config", arguments.what, _WAYS, "view")
    if what == "schema":
        say(*json.dumps(json_schema(), indent=2).split("\n"))
        return 0
    request = request_of(arguments)
    layers = config_layers(request)
    config = choose_config(request, layers)
    values = masked_values(config.model_dump(mode="json"))
    if what == "where":
        rows = _places(values, layers)
        if arguments.json:
            print_json({key: {"value": value, "place": place} for key, value, place in rows})
        else:
            say(*aligned([(key, json.dumps(value), place) for key, value, place in rows]))
    elif arguments.json:
        print_json(values)
    else:
        say(*to_yaml(config, mask=True).rstrip("\n").split("\n"))
    return 0


def _places(values: dict[str, object], layers: Sequence[Layer]) -> list[tuple[str, object, str]]:
    """Return key, value and place of each value that a layer gives, in the order of the config."""
    where = merge(layers).where
    return [(key, value, where[key]) for key, value in _leaves(values) if key in where]


def _leaves(values: dict[str, object], above: str = "") -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value
