"""The key ``job.nodes``: a number of nodes, or a range from which Slurm takes a number at each start."""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import PlainValidator, WithJsonSchema

from hpcrun.config.problems import value_text

if TYPE_CHECKING:
    from hpcrun.config.schema import Config

_MAX = 10**6  # nodes; more is a typing error
_NUMBER = re.compile(r"[+-]?[0-9]{1,18}", re.ASCII)
_RANGE = re.compile(r"([0-9]{1,18}) *- *([0-9]{1,18})", re.ASCII)


def _check_nodes(value: Any) -> int | str:
    if value is None:
        raise ValueError("may not be null; give it a value or omit the key")
    text = str(value).strip()
    known = isinstance(value, int | str) and not isinstance(value, bool)
    found = _RANGE.fullmatch(text)
    if not known or not (found or _NUMBER.fullmatch(text)):
        kinds = "a whole number, or a range such as 2-4"
        raise ValueError(f"should be {kinds}, not {value_text(value)}")
    least, most = (int(found[1]), int(found[2])) if found else (int(text), int(text))
    if least < 1:
        raise ValueError(f"should be at least 1, not {value_text(value)}")
    if most < least:
        raise ValueError(f"ends before it begins: {value_text(value)}; write {most}-{least}")
    if most > _MAX:
        raise ValueError(f"should be at most {_MAX}, not {value_text(value)}")
    return least if least == most else f"{least}-{most}"


NodeCount = Annotated[
    int | str,
    PlainValidator(_check_nodes),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 1},
                {"type": "string", "pattern": "^[0-9]+(-[0-9]+)?$"},
            ]
        }
    ),
]
"""A number of nodes, or the text ``2-4``."""


def node_limits(nodes: int | str) -> tuple[int, int]:
    """Return the smallest and the largest number of nodes of a checked value of ``job.nodes``."""
    least, _, most = str(nodes).partition("-")
    return int(least), int(most or least)


def node_contradictions(config: "Config") -> Iterator[tuple[list[str], str]]:
    """Yield what contradicts the number of nodes: the keys, starting with the key to change, and the text."""
    job, train = config.job, config.train
    ranks = job.tasks_on_node * (train.accumulation if train.micro_batch is None else 1)
    parts = job.max_nodes * ranks
    # A command of the user may divide its work in any way.
    if train.batch_size < parts and not config.command:
        # Uneven micro-batches are weighted, so every number of nodes with enough samples gives the mean of
        # the batch.
        fits = train.batch_size // ranks
        fewer = f", or job.nodes={_range(job.min_nodes, fits)}" if fits >= job.min_nodes else ""
        yield (
            ["train.batch_size", "job.gpus", "job.nodes", "train.accumulation"],
            f"{train.batch_size} samples are too few for {job.max_nodes} x {job.gpus} ranks x "
            f"{ranks // job.tasks_on_node} micro-batches, each with at least one; use {parts} or more"
            f"{fewer if job.elastic else ''}",
        )
    if job.spares and not config.restarts.in_place:
        yield (
            ["job.spares", "restarts.in_place"],
            "a spare node serves a restart inside the allocation; set restarts.in_place=true, "
            "or use no spares",
        )
    if not job.elastic:
        return
    if job.spares:
        yield (
            ["job.spares", "job.nodes"],
            f"a job with {job.nodes} nodes continues without a lost node, so spare nodes would be idle; use "
            "one number of nodes, or no spares",
        )
    if train.deterministic == "strict" and not config.command:
        yield (
            ["job.nodes", "train.deterministic"],
            f"strict refuses other bits on resume, and the bits depend on the number of nodes, {job.nodes}; "
            "use one number of nodes, or train.deterministic=true",
        )


def _range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}-{most}"
