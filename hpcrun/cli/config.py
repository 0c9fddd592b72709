"""Show the config that a command line means, with every default; or the schema, for editors.

hpcrun config show -c configs/gpt.yaml train.lr=1e-3
hpcrun config schema > hpcrun.schema.json
"""

import argparse
import json
from pathlib import Path

from hpcrun.cli.chosen import choose_config
from hpcrun.config import json_schema, to_yaml
from hpcrun.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    parser.add_argument("what", metavar="show|schema", help="what to print")
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="YAML or JSON config")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="config overrides")
    parser.add_argument("--json", action="store_true", help="JSON instead of YAML")


def run(arguments: argparse.Namespace) -> int:
    """Print the config or the schema."""
    if arguments.what == "schema":
        print(json.dumps(json_schema(), indent=2))
        return 0
    if arguments.what != "show":
        raise UserError(f"config {arguments.what}: say `config show` or `config schema`")
    config = choose_config(arguments)
    if arguments.json:
        print(json.dumps(config.model_dump(mode="json"), indent=2))
    else:
        print(to_yaml(config), end="")
    return 0
