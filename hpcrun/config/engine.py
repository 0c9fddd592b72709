"""Validators of pydantic's engine, made from annotations, and marks for ``Annotated`` that add checks.

pydantic makes the same schemas from any annotation. This module knows only the annotations of keys, because
``import pydantic`` costs more CPU time than ``import submitit`` (``tools/bench/startup.py``).
"""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic_core import PydanticUndefined, SchemaSerializer, SchemaValidator
from pydantic_core import core_schema as core

_PLAIN: dict[type, core.CoreSchema] = {
    bool: core.bool_schema(),
    float: core.float_schema(),
    int: core.int_schema(),
    str: core.str_schema(),
}


class SchemaMark:
    """Mark for ``Annotated`` that changes the schema of a value; pydantic's models understand it too.

    Args:
        change: returns the changed schema.
        json: the JSON schema, if it cannot follow from the schema.
    """

    def __init__(self, change: Callable[[Any], Any], json: Mapping[str, Any] | None = None) -> None:
        self._change = change
        self._json = json

    def __get_pydantic_core_schema__(self, source: Any, handler: Callable[[Any], Any]) -> Any:
        return self._change(handler(source))

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> Any:
        return self._json or handler(schema)


def limits(**named: float) -> SchemaMark:
    """Return a mark for limits, named as in ``pydantic_core.core_schema``: ge, gt, le, lt, min_length."""
    return SchemaMark(lambda schema: {**schema, **named})


def before(check: Callable[[Any], Any]) -> SchemaMark:
    """Return a mark for a check that gets the value as given, and returns the value to use."""
    return SchemaMark(lambda schema: core.no_info_before_validator_function(check, schema))


def after(check: Callable[[Any], Any]) -> SchemaMark:
    """Return a mark for a check that gets the value in its type, and returns the value to use."""
    return SchemaMark(lambda schema: core.no_info_after_validator_function(check, schema))


def after_others(check: Callable[[Any, Mapping[str, Any]], Any]) -> SchemaMark:
    """Return a mark as of `after`, for a check that also gets the valid values of the keys above."""
    return SchemaMark(
        lambda schema: core.with_info_after_validator_function(
            lambda value, info: check(value, info.data), schema
        )
    )


def validator(annotation: Any) -> SchemaValidator:
    """Return the validator of a section, or of the annotation of a key."""
    made: SchemaValidator = _made(SchemaValidator, annotation)
    return made


def serializer(section: Any) -> SchemaSerializer:
    """Return the serializer of a section."""
    made: SchemaSerializer = _made(SchemaSerializer, section)
    return made


@cache
def _made(kind: Any, annotation: Any) -> Any:
    return kind(_schema(annotation))


def _schema(annotation: Any) -> core.CoreSchema:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        schema = _schema(parts[0])
        for mark in parts[1:]:
            schema = mark.__get_pydantic_core_schema__(parts[0], lambda _, made=schema: made)
        return schema
    if origin in (Union, types.UnionType):
        (kind,) = (part for part in parts if part is not type(None))
        return core.nullable_schema(_schema(kind))
    if origin is Literal:
        return core.literal_schema(list(parts))
    if origin is list:
        return core.list_schema(_schema(parts[0]))
    if origin is tuple:
        return core.tuple_schema([_schema(part) for part in parts])
    if origin is dict:
        return core.dict_schema(*map(_schema, parts))
    return _PLAIN[annotation] if annotation in _PLAIN else section_schema(annotation)


def section_schema(section: Any) -> core.CoreSchema:
    """Return the schema of a section, for the engine and for a pydantic model with the section as a key."""
    return _section_schema(section)


@cache
def _section_schema(section: Any) -> core.CoreSchema:
    fields = {}
    for name, key in section.model_fields.items():
        schema = _schema(key.annotation)
        if key.default is not PydanticUndefined:
            schema = core.with_default_schema(schema, default=key.default)
        fields[name] = core.model_field(schema)
    title, extra = section.__name__, section.model_config["extra"]
    return core.model_schema(
        section,
        core.model_fields_schema(fields, model_name=title),
        config=core.CoreConfig(title=title, extra_fields_behavior=extra),
    )
