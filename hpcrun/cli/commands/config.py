"""Show the config that a command line results in, with every default, or show
the schema for editors.
  hpcrun config show -c configs/gpt.yaml train.lr=1e-3
  hpcrun config schema > hpcrun.schema.json
"""

import argparse
import json
from pathlib import Path

from hpcrun.api.submission.choose_config import choose_config
from hpcrun.cli.arguments import request_of, require_subcommand
from hpcrun.cli.output import print_json
from hpcrun.config import json_schema, masked_values, to_yaml
from hpcrun.printing import say

_WAYS = ("show", "schema")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "hpcrun config show|schema [-c FILE] [--json] [key.sub=value ...]"
    parser.add_argument("what", metavar="show|schema", nargs="?", help="what to print")
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="YAML or JSON config")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="config overrides")
    parser.add_argument("--json", action="store_true", help="JSON instead of YAML")


def run(arguments: argparse.Namespace) -> int:
    """Print the config or the schema."""
    what = require_subcommand("config", arguments.what, _WAYS, "view")
    if what == "schema":
        say(*json.dumps(json_schema(), indent=2).split("\n"))
        return 0
    config = choose_config(request_of(arguments))
    if arguments.json:
        print_json(masked_values(config.model_dump(mode="json")))
    else:
        say(*to_yaml(config, mask=True).rstrip("\n").split("\n"))
    return 0
