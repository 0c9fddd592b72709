"""Docstrings of the public names: arguments, exceptions, and the fields of the classes."""

import ast
import builtins
import importlib
import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

MODULES = ("hpcrun", "hpcrun.config", "hpcrun.ports")
_SPECIAL = {"__init__", "__getitem__", "__iter__", "__len__"}
_QUESTION = re.compile(r"(?:What|Whether|Which|How|Who)\b")


class Public(NamedTuple):
    """A public function or method, with the class that defines it."""

    name: str
    function: Callable[..., Any]
    owner: type | None

    @property
    def text(self) -> str:
        """The docstring; a constructor also has that of its class."""
        parts = [self.function]
        if self.owner is not None and self.name.endswith(".__init__"):
            parts.append(self.owner)
        return "\n".join(inspect.cleandoc(part.__doc__) for part in parts if part.__doc__)

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters, without ``self`` and ``cls``."""
        code = inspect.unwrap(self.function).__code__
        names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
        return list(names[self.owner is not None :])


def objects() -> Iterator[tuple[str, Any]]:
    """Yield every public function and class; for an instance its class."""
    for name in MODULES:
        module = importlib.import_module(name)
        for public in {*module.__all__, *vars(module).get("_HOMES", ())} - {"open"}:
            found = getattr(module, public)
            plain = isinstance(found, type) or inspect.isfunction(found)
            yield f"{name}.{public}", found if plain else type(found)


def public_functions() -> Iterator[Public]:
    for name, found in objects():
        if inspect.isfunction(found):
            yield Public(name, found, None)
            continue
        for owner in found.__mro__:
            for member, value in list(vars(owner).items()):
                function = getattr(value, "__func__", None) or getattr(value, "fget", None) or value
                # The constructor of a data class is generated.
                written = inspect.isfunction(function) and function.__code__.co_filename[0] != "<"
                shown = member in _SPECIAL or not member.startswith("_")
                if shown and written and owner.__module__.startswith("hpcrun."):
                    yield Public(f"{name}.{member}", function, owner)


def raised(
    function: Callable[..., Any], owner: type | None, seen: tuple[Any, ...] = ()
) -> set[type[BaseException]]:
    """Return the exceptions of the function and of the private helpers of its class and module."""
    function = inspect.unwrap(function)
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    known = vars(builtins) | function.__globals__
    found: set[type[BaseException]] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found.add(known[ast.unparse(node.exc.func)])
        helper = None
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            helper = known.get(node.func.id)
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            of_owner = ast.unparse(node.func.value) in ("self", "cls")
            helper = getattr(owner, node.func.attr, None) if of_owner else None
        helper = getattr(helper, "__func__", helper)
        if inspect.isfunction(helper) and helper.__name__.startswith("_") and helper not in seen:
            found |= raised(helper, owner, (*seen, helper))
    return found


def problems(public: Public) -> Iterator[str]:
    text = public.text
    if not text:
        yield "has no docstring"
    if _QUESTION.match(text):
        yield "begins with a question word"
    for name in public.parameters:
        if not re.search(rf"`{name}\b|^ *{name}:", text, re.M):
            yield f"does not name the argument {name}"
    documented = set(re.findall(r"\w+", text.partition("Raises:")[2]))
    for error in raised(public.function, public.owner):
        if not documented & {base.__name__ for base in error.__mro__[:-3]}:
            yield f"has no {error.__name__} under Raises"


def test_public_docstrings_name_every_argument_and_exception() -> None:
    found = list(public_functions())
    assert len(found) > 100
    assert not [f"{one.name}: {line}" for one in found for line in problems(one)]


def test_public_classes_describe_every_field() -> None:
    undescribed = []
    for name, found in objects():
        fields = getattr(found, "model_fields", {})
        undescribed += [f"{name}.{key}" for key, field in fields.items() if not field.description]
        plain = getattr(found, "__dataclass_fields__", {})
        text = found.__doc__ or ""
        undescribed += [
            f"{name}.{key}" for key in plain if not re.search(rf"^ *{key}:", text, re.M)
        ]
    assert not undescribed
