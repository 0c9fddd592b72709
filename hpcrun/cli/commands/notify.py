"""Give a test message to the command of `watch.notify`, on this host.

  hpcrun notify -c configs/gpt.yaml
  hpcrun notify watch.notify='mail -s "$HPCRUN_TEXT" me@example.org'

Exit code 1: the message was not delivered; a line says why.
"""

import argparse
import os
from pathlib import Path

from hpcrun.api.submission.choose_config import choose_config
from hpcrun.cli.arguments import request_of
from hpcrun.config import masked
from hpcrun.errors import UserError
from hpcrun.job.notifying import DeliveryError, deliver, trial_message
from hpcrun.printing import say, say_aside


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "hpcrun notify [-c FILE] [key.sub=value ...]"
    parser.add_argument("-c", "--config", type=Path, metavar="FILE", help="YAML or JSON config")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="config overrides")


def run(arguments: argparse.Namespace) -> int:
    """Send the test message and print the outcome."""
    config = choose_config(request_of(arguments))
    target = config.watch.notify
    if target is None:
        raise UserError("watch.notify: is not set; give -c FILE, or watch.notify=COMMAND")
    try:
        deliver(target, trial_message(config.name or "test"), os.environ)
    except DeliveryError as problem:
        say_aside(f"hpcrun: not delivered: {problem}")
        return 1
    say(f"hpcrun: delivered to {masked(target)}")
    return 0
