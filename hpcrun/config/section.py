"""Base classes of the config's sections: immutable classes whose values pydantic's engine checks.

The sections use ``pydantic_core``, the engine of pydantic, but not pydantic: its import costs more CPU time
than ``import submitit``, and reads many files of a login node's shared file system
(``tools/bench/startup.py``). Values and errors are those of pydantic's models. So are the names of the
methods, because the options of a user's task are such models. Decision 0008 has the reasons.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, overload

from pydantic_core import PydanticUndefined, ValidationError
from typing_extensions import dataclass_transform

from hpcrun.config.engine import section_schema, serializer, validator

if TYPE_CHECKING:
    from pydantic import BaseModel
    from typing_extensions import Self

_Value = TypeVar("_Value")
_Section = TypeVar("_Section", bound="Section")


@dataclass(frozen=True)
class Key:
    """A key of a section: its type, its default (``PydanticUndefined``: none), and a description."""

    annotation: Any
    default: Any
    description: str


@overload
def field(*, default: _Value, description: str) -> _Value: ...


@overload
def field(*, description: str) -> Any: ...


def field(*, default: Any = PydanticUndefined, description: str) -> Any:
    """Declare a key of a section."""
    return Key(None, default, description)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(field,))
class Section:
    """A section of the config: immutable, without unknown keys.

    Raises:
        pydantic.ValidationError: a key is unknown, or a value is wrong.
    """

    # The engine sets these attributes. Source: ``pydantic_core.core_schema.model_schema``.
    __slots__ = (
        "__dict__",
        "__pydantic_extra__",
        "__pydantic_fields_set__",
        "__pydantic_private__",
    )
    __pydantic_extra__: dict[str, Any] | None
    model_config: ClassVar[Mapping[str, Any]] = {"extra": "forbid"}
    model_fields: ClassVar[Mapping[str, Key]] = {}

    def __init_subclass__(cls) -> None:
        # A module of sections may not postpone its annotations: `typing.get_type_hints` takes milliseconds.
        keys = {
            name: replace(value, annotation=cls.__annotations__[name])
            for name, value in vars(cls).items()
            if isinstance(value, Key)
        }
        for name in keys:
            delattr(cls, name)
        cls.model_fields = {**cls.model_fields, **keys}

    def __init__(self, /, **values: Any) -> None:
        validator(type(self)).validate_python(values, self_instance=self)

    @classmethod
    def model_validate(cls, values: Any) -> Self:
        """Return the section of ``values``, checked.

        Raises:
            pydantic.ValidationError: a key is unknown, or a value is wrong.
        """
        checked: Self = validator(cls).validate_python(values)
        return checked

    @classmethod
    def model_construct(cls, /, **values: Any) -> Self:
        """Return the section of ``values`` that are known to be right, and of defaults."""
        fields = {
            name: values.pop(name) if name in values else deepcopy(key.default)
            for name, key in cls.model_fields.items()
        }
        return _filled(cls, fields, values)

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self:
        """Return a copy with the values of ``update``, which are known to be right."""
        return self.model_construct(**{**dict(self), **(update or {})})

    def model_dump(
        self, *, mode: Literal["python", "json"] = "python", exclude: set[str] | None = None
    ) -> dict[str, Any]:
        """Return the values by key, and sections as mappings.

        Args:
            mode: ``python`` keeps the types of the values, ``json`` returns only types that JSON has.
            exclude: keys to leave out.
        """
        values: dict[str, Any] = serializer(type(self)).to_python(self, mode=mode, exclude=exclude)
        return values

    def model_dump_json(self, *, indent: int | None = None) -> str:
        """Return the values as JSON text, indented by ``indent`` spaces if given."""
        return serializer(type(self)).to_json(self, indent=indent).decode()

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        """Return the JSON schema of the section, as pydantic writes it."""
        return _as_pydantic(cls).model_json_schema()

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        # For a user's pydantic model that has a section as a key.
        return section_schema(cls)

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """Iterate over keys and values."""
        yield from {**self.__dict__, **(self.__pydantic_extra__ or {})}.items()

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Section) and type(other) is type(self) and dict(self) == dict(other)
        )

    def __hash__(self) -> int:
        return hash((type(self), *self.__dict__.values()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self)})"

    def __reduce__(self) -> tuple[Any, ...]:
        return _filled, (type(self), dict(self.__dict__), self.__pydantic_extra__)

    def __setattr__(self, name: str, value: Any) -> None:
        raise ValidationError.from_exception_data(
            type(self).__name__, [{"type": "frozen_instance", "loc": (name,), "input": value}]
        )

    def __delattr__(self, name: str) -> None:
        setattr(self, name, None)


class TaskSection(Section):
    """A section of the config with further keys, which the task defines and checks."""

    model_config: ClassVar[Mapping[str, Any]] = {"extra": "allow"}

    @property
    def own(self) -> dict[str, Any]:
        """Values of the keys that belong to the task, without those of the section itself."""
        return dict(self.__pydantic_extra__ or {})

    if not TYPE_CHECKING:  # type checkers know the keys

        def __getattr__(self, name: str) -> Any:
            own = object.__getattribute__(self, "__pydantic_extra__") or {}
            remedy = f"; a key of the task is in own[{name!r}]" if name in own else ""
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}{remedy}")


def _filled(
    section: type[_Section], fields: dict[str, Any], extra: dict[str, Any] | None
) -> _Section:
    made = section.__new__(section)
    # As the engine does; `__setattr__` refuses.
    for name, value in zip(Section.__slots__, (fields, extra, set(fields), None), strict=True):
        object.__setattr__(made, name, value)
    return made


def _as_pydantic(section: type[Section]) -> type[BaseModel]:
    """Return a pydantic model with the keys of ``section``."""
    from pydantic import ConfigDict, Field, create_model

    keys: dict[str, Any] = {}
    for name, key in section.model_fields.items():
        kind, default = key.annotation, key.default
        if isinstance(default, Section):
            kind, default = _as_pydantic(kind), default.model_dump()
        keys[name] = (kind, Field(default=default, description=key.description))
    config = ConfigDict(extra=section.model_config["extra"])
    return create_model(section.__name__, __config__=config, __doc__=section.__doc__, **keys)
