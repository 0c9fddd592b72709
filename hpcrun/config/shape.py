"""The kind of value that the schema expects at each key.

The reader needs the kind: `time: 1:30:00`, `NCCL_VERSION: 2.10` and `account: 0123` are text in a config. A
YAML reader without the schema would convert them to numbers.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from hpcrun.config.schema import Config

Kind = Literal["section", "list", "mapping", "text", "other", "unknown"]


def kind_at(path: Sequence[str]) -> Kind:
    """Return the kind of value at a path of keys; `unknown` if the schema has no such key."""
    annotation: Any = Config
    for step in path:
        annotation = _below(annotation, step)
        if annotation is None:
            return "unknown"
    return _kind(annotation)


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a model, each section before its keys, in the schema's order."""
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}" if prefix else name
        yield key
        annotation = _plain(field.annotation)
        if _kind(annotation) == "section":
            yield from known_keys(annotation, key)


def _below(annotation: Any, step: str) -> Any:
    kind = _kind(annotation)
    if kind == "section":
        field = annotation.model_fields.get(step)
        return None if field is None else _plain(field.annotation)
    if kind == "list":
        return _plain(get_args(annotation)[0])
    if kind == "mapping":
        return _plain(get_args(annotation)[1])
    return None


def _kind(annotation: Any) -> Kind:
    origin = get_origin(annotation)
    if origin in (list, tuple):
        return "list"
    if origin is dict:
        return "mapping"
    if annotation is str or (origin is Literal and True not in get_args(annotation)):
        return "text"
    if hasattr(annotation, "model_fields"):  # a section, or a model of a task
        return "section"
    return "other"


def _plain(annotation: Any) -> Any:
    """Return an annotation without `Annotated`, and without the `None` of an optional value."""
    while True:
        if get_origin(annotation) is Annotated:
            annotation = get_args(annotation)[0]
        elif get_origin(annotation) in (Union, types.UnionType):
            kept = [part for part in get_args(annotation) if part is not type(None)]
            if len(kept) != 1:
                return annotation
            annotation = kept[0]
        else:
            return annotation
