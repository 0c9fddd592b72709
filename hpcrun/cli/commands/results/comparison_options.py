"""The options that `hpcrun compare` and `hpcrun report` share: the metric, its moment, and the groups."""

import argparse

from hpcrun.errors import UserError


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument(
        "--metric",
        metavar="NAME",
        help="a metric, or result.KEY of result.json (default: validation_loss, else loss)",
    )
    parser.add_argument(
        "--goal",
        choices=("min", "max"),
        help="whether lower or higher is better (default: by the metric's name)",
    )
    parser.add_argument(
        "--at", default="last", metavar="WHEN", help="last, best, or a step (default: last)"
    )
    parser.add_argument(
        "--by",
        metavar="KEYS",
        help="group by these keys of the config, such as train.lr,model.width",
    )
    parser.add_argument(
        "--seed-key", default="seed", metavar="KEY", help="the config key that holds the seed"
    )


def require_moment(at: str) -> None:
    """Raise UserError if ``--at`` is no moment of a run."""
    if at not in ("last", "best") and not at.isdigit():
        raise UserError(f"--at {at}: should be last, best or a step")


def keys(by: str | None) -> list[str] | None:
    """Return the keys of ``--by``; None if it is not given."""
    return by.split(",") if by else None
