"""What kind of value each key of the schema holds.

A reader has to know it: `time: 1:30:00`, `NCCL_VERSION: 2.10` and `account: 0123` are text in a
config, and a YAML reader that decides by looks alone would hand over other characters.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

from hpcrun.config.schema import Config

Kind = Literal["section", "list", "mapping", "text", "other", "unknown"]


def kind_at(path: Sequence[str]) -> Kind:
    """Return what the schema wants at a path of keys; `unknown` where it has no such key."""
    annotation: Any = Config
    for step in path:
        annotation = _below(annotation, step)
        if annotation is None:
            return "unknown"
    return _kind(annotation)


def known_keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a model, sections before what they hold, in the schema's order."""
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
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "section"
    return "other"


def _plain(annotation: Any) -> Any:
    """Return an annotation without its `Annotated` and without the `None` of an optional one."""
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
