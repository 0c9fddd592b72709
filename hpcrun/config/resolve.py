"""Resolution of layers into a checked config, or into a line for each problem."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from hpcrun.config.conflicts import idle_keys, sharing_contradictions
from hpcrun.config.fields import Section
from hpcrun.config.layers import DEFAULTS, Layer, file_layer, given_key, merge
from hpcrun.config.problems import (
    MOST_SHOWN,
    UNKNOWN,
    ConfigError,
    Problem,
    key_of,
    unknown,
    words,
)
from hpcrun.config.schema import Config
from hpcrun.config.shape import known_keys
from hpcrun.config.training import DataOptions, ModelOptions

_LINE = re.compile(r"(?P<file>.*):(?P<line>\d+)")


def resolve(layers: Iterable[Layer]) -> Config:
    """Merge ``layers`` into a checked config; a later layer replaces values of an earlier layer.

    Raises:
        ConfigError: a key is unknown, a value is wrong, or keys contradict each other. The text has a line
            for each problem, in the order of the layers and of the lines in a file.
    """
    merged = merge(layers)
    try:
        config = Config.model_validate(merged.values)
    except ValidationError as error:
        known, errors = list(known_keys(Config)), error.errors()
        # The search for a similar key takes milliseconds for each key.
        given = [(_first_given([key_of(it)], merged.where), it) for it in errors]
        given.sort(key=_in_order(merged.where))
        shown = [(place, *words(it, known)) for place, it in given[:MOST_SHOWN]]
        more = len(given) - len(shown)
    else:
        found = list(contradictions(config))
        if not found:
            return config
        of_keys = [(_first_given(keys, merged.where), (keys[0], text)) for keys, text in found]
        of_keys.sort(key=_in_order(merged.where))
        shown, more = [(place, *one) for place, one in of_keys], 0
    raise ConfigError(
        [Problem(merged.where.get(key, DEFAULTS), *rest) for key, *rest in shown], more
    )


def _first_given(keys: Sequence[str], where: Mapping[str, str]) -> str:
    """Return the first given key, or else the section of one, for the place in a message; or ""."""
    exact = (key for key in keys if key in where)
    around = filter(None, (given_key(key, where) for key in keys))
    return next(exact, None) or next(around, "")


def _in_order(where: Mapping[str, str]) -> Callable[[tuple[str, Any]], int]:
    order = {key: number for number, key in enumerate(where)}
    return lambda found: order.get(found[0], len(order))


def idle_lines(config: Config, layers: Iterable[Layer]) -> list[str]:
    """Return a line for each key of ``layers`` that another key makes ineffective in ``config``."""
    where = merge(layers).where
    return [str(Problem(where[key], key, text)) for key, text in idle_keys(config, where)]


def load_resolved(path: str | Path, content: bytes | None = None) -> Config:
    """Read a resolved config: the file ``path`` of a run directory.

    Args:
        content: the bytes of the file, if the caller has read it.

    Raises:
        ConfigError: the file cannot be read, or is not a valid config.
    """
    try:
        return resolve([file_layer(path, content=content)])
    except ConfigError as error:
        raise ConfigError(map(_of_another_version, error.problems), error.more) from None


def _of_another_version(problem: Problem) -> Problem:
    if not problem.text.startswith(UNKNOWN):
        return problem
    remedy = "if another version of hpcrun wrote the file, continue the run with that version"
    return replace(problem, text=f"{problem.text}; {remedy}")


def with_task_options(
    config: Config,
    options: tuple[type[BaseModel], type[BaseModel]],
    where: Callable[[str], str],
) -> Config:
    """Return ``config`` with the sections ``model`` and ``data`` checked and completed by a task's models.

    Args:
        config: a resolved config.
        options: the models of the two sections.
        where: the function of :func:`locate`.

    Raises:
        ConfigError: the problems of both sections.
    """
    sections: tuple[ModelOptions, DataOptions] = (config.model, config.data)
    problems: list[Problem] = []
    more = 0
    update: dict[str, Section] = {}
    for name, model, section in zip(("model", "data"), options, sections, strict=True):
        found, further, checked = _check(model, section.own, name, where)
        problems += found
        more += further
        # The keys of hpcrun come last: a task cannot give them another default.
        # All values are checked by now: a second check would build validators for it.
        update[name] = type(section).model_construct(
            **checked | section.model_dump(exclude=set(section.own))
        )
    if problems:
        raise ConfigError(sorted(problems, key=_line_order), more)
    return config.model_copy(update=update)


def _check(
    model: type[BaseModel],
    values: Mapping[str, Any],
    prefix: str,
    where: Callable[[str], str],
) -> tuple[list[Problem], int, dict[str, Any]]:
    """Return the first problems, the number of further problems, and the checked values."""
    more = 0
    known = list(dict.fromkeys([*known_keys(model, prefix), *known_keys(Config)]))
    found: list[tuple[str, str]] = []
    checked: dict[str, Any] = {}
    if model.model_config.get("extra", "ignore") == "ignore":
        fields = model.model_fields.items()
        names = {name for field, info in fields for name in (field, getattr(info, "alias", field))}
        extra = [f"{prefix}.{key}" for key in values if key not in names]
        found += [(key, unknown(key, known)) for key in extra[:MOST_SHOWN]]
        more += max(0, len(extra) - MOST_SHOWN)
    try:
        checked = model.model_validate(dict(values)).model_dump(mode="json")
    except ValidationError as error:
        errors = error.errors()
        more += max(0, len(errors) - MOST_SHOWN)
        for details in errors[:MOST_SHOWN]:
            details["loc"] = (prefix, *details["loc"])
            found.append(words(details, known))
    return [Problem(where(key), key, text) for key, text in found], more, checked


def _line_order(problem: Problem) -> tuple[str, int]:
    match = _LINE.fullmatch(problem.place)
    return (match["file"], int(match["line"])) if match else (problem.place, 0)


def contradictions(config: Config) -> Iterator[tuple[list[str], str]]:
    """Yield contradictions between valid keys: the keys, starting with the key to change, and the text."""
    job, train = config.job, config.train
    yield from _of_nodes(config)
    if train.micro_batch is not None and train.accumulation > 1:
        yield (
            ["train.accumulation", "train.micro_batch"],
            "follows from train.micro_batch and the number of ranks; omit one of them",
        )
    if train.lr_scaling != "none" and train.lr_base_batch is None:
        yield (
            ["train.lr_base_batch", "train.lr_scaling"],
            f"lr_scaling={train.lr_scaling} needs the batch size that train.lr was chosen for; set it",
        )
    if train.patience is not None and not train.validate_every:
        yield (
            ["train.validate_every", "train.patience"],
            "train.patience counts validations during training; set the steps between validations",
        )
    saves = config.checkpoint
    if config.restarts.replace_slow and not (saves.every or saves.minutes or saves.auto):
        yield (
            ["checkpoint.every", "restarts.replace_slow"],
            "restarts.replace_slow restarts after a save during training; set the steps between saves",
        )
    yield from sharing_contradictions(config)
    if config.optim.warmup_steps > train.steps:
        yield (
            ["optim.warmup_steps", "train.steps"],
            f"{config.optim.warmup_steps} is more than train.steps={train.steps}; lower it",
        )
    if config.optim.schedule == "wsd":
        ends = config.optim.warmup_steps + (config.optim.decay_steps or 0)
        if config.optim.warmup_steps <= train.steps < ends:
            yield (
                ["optim.decay_steps", "optim.warmup_steps", "train.steps"],
                f"warm-up and decay take {ends} steps, but train.steps is {train.steps}",
            )
    yield from _of_tasks(config)
    yield from _of_image(config)
    if job.executor == "debug" and job.world_size != 1:
        yield (
            ["job.executor", "job.nodes", "job.gpus"],
            f"debug runs one rank in one process, but {job.nodes} x {job.tasks_on_node} are requested; "
            "use one node and one gpu, or the local executor",
        )
    if job.gpu_type is not None and job.gpu_request == "none" and not job.cpu:
        yield (
            ["job.gpu_type", "job.gpu_request"],
            f"job.gpu_request=none requests no GPUs, so it cannot request the type {job.gpu_type}; omit "
            "the type, or choose nodes by their features with job.constraint",
        )
    limit = job.time_seconds
    if limit is not None and limit <= job.signal_lead:
        yield (
            ["job.time", "job.signal_lead"],
            f"the limit {job.time} is not longer than job.signal_lead ({job.signal_lead} s), the warning "
            "before it; set a longer limit, or a shorter job.signal_lead",
        )


def _of_image(config: Config) -> Iterator[tuple[list[str], str]]:
    """Yield contradictions among the keys on the container."""
    job = config.job
    if job.mounts and job.image is None:
        yield ["job.mounts"], "needs job.image; set the image, or omit the key"
    if job.container and job.image is not None:
        yield (
            ["job.container", "job.image"],
            "job.image chooses the words before the command; omit job.container",
        )
    if job.image is not None and job.executor == "debug":
        yield (
            ["job.executor", "job.image"],
            "debug runs the rank in this process, outside the image; use the local executor",
        )


def _of_tasks(config: Config) -> Iterator[tuple[list[str], str]]:
    """Yield contradictions among the keys on the number of tasks per node."""
    job = config.job
    if job.launcher is not None and not config.command:
        yield (
            ["job.launcher"],
            f"{job.launcher} starts your script; write the script after `--`, or remove the key",
        )
    elif job.launcher is not None and job.tasks_per_node not in (None, 1):
        yield (
            ["job.tasks_per_node", "job.launcher"],
            f"{job.launcher} is the only task of a node and starts the ranks; remove the key",
        )
    elif job.tasks_per_node not in (None, job.gpus) and not config.command:
        yield (
            ["job.tasks_per_node", "job.launcher", "job.gpus"],
            "training by hpcrun has one task per GPU; set job.gpus instead, or write your command after "
            "`--`",
        )


def _of_nodes(config: Config) -> Iterator[tuple[list[str], str]]:
    """Yield what contradicts the number of nodes: the keys, starting with the key to change, and the text."""
    job, train = config.job, config.train
    ranks = job.tasks_on_node * (train.accumulation if train.micro_batch is None else 1)
    parts = job.max_nodes * ranks
    # A command of the user may divide its work in any way.
    if train.batch_size < parts and not config.command:
        # Uneven micro-batches are weighted, so every number of nodes with enough samples gives the mean of
        # the batch.
        fits = train.batch_size // ranks
        fewer = f", or job.nodes={_as_range(job.min_nodes, fits)}" if fits >= job.min_nodes else ""
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


def _as_range(least: int, most: int) -> str:
    return str(least) if least == most else f"{least}-{most}"
