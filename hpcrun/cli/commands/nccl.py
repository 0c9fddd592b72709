"""Check or choose the environment variables of NCCL, RCCL and PyTorch's NCCL.

  hpcrun nccl lint             this shell's environment
  hpcrun nccl lint train.sh    a script: shell, batch, Dockerfile, Python
  hpcrun nccl lint gpt.yaml    a config's job.env, job.setup and job.srun_args
  hpcrun nccl lint RUN         the settings of a submitted run
  hpcrun nccl advise           advice for this node, with the reasons
  hpcrun nccl tune             measure collectives, here or in a job, and
                               keep a setting that is significantly faster

`lint` exits with code 1 if it finds an error. In an allocation, `advise`
inspects every node and reports where the nodes differ.
"""

import argparse
import importlib

from hpcrun.cli.arguments import add_runs_dir, require_subcommand
from hpcrun.cli.commands import nccl_tune

_WAYS = ("lint", "advise", "tune")
FORMATS = ("table", "shell", "yaml", "json")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "hpcrun nccl lint|advise|tune [options] [WHAT]"
    parser.add_argument("what", metavar="lint|advise|tune", nargs="?", help="what to do")
    parser.add_argument(
        "target",
        metavar="WHAT",
        nargs="?",
        help="lint: a script, a config or a run (default: this shell's environment)",
    )
    parser.add_argument(
        "--nccl",
        metavar="VERSION",
        help="NCCL's version in the job (default: the installed wheel's)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_runs_dir(parser)
    lint = parser.add_argument_group("lint")
    lint.add_argument(
        "--notes", action="store_true", help="print notes too, not only errors and warnings"
    )
    advise = parser.add_argument_group("advise")
    advise.add_argument(
        "--format", choices=FORMATS, default="table", help="table, shell exports, YAML or JSON"
    )
    advise.add_argument(
        "--facts", metavar="FILE", help="advise on a node's recorded facts, not on this node"
    )
    advise.add_argument(
        "--record", action="store_true", help="print this node's facts as JSON, for --facts"
    )
    nccl_tune.add_arguments(parser.add_argument_group("tune"))


def run(arguments: argparse.Namespace) -> int:
    """Run ``lint``, ``advise`` or ``tune``."""
    what = require_subcommand("nccl", arguments.what, _WAYS, "check")
    module = importlib.import_module(f"hpcrun.cli.commands.nccl_{what}")
    code: int = module.run(arguments)
    return code
