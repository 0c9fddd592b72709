"""Find parameters that a forward pass reads from other modules: ``F.linear(x, self.embedding.weight)``.

FSDP gathers a unit's weights only for the unit's own forward pass. A module outside the unit that reads the
weights directly finds a shard. When the model is sharded there is no batch to run, so the code here analyzes
the source of ``forward`` and of the functions that it calls: attributes, loops over submodules, local names,
and calls of methods and functions. Code that cannot be analyzed counts as not reading. Torch's own modules
are skipped: some read weights of their submodules, but only in a fast path that sharded models do not take.
"""

import ast
import functools
import inspect
import textwrap
from collections.abc import Iterable, Sequence
from types import FunctionType, MethodType
from typing import Any

from torch import nn

_MOST_CALLS = 8
"""Maximum depth of calls to follow."""

# Attributes for which a shard gives the same answer as the whole parameter.
_SAME_IN_SHARD = {
    "device",
    "dtype",
    "ndim",
    "dim",
    "requires_grad",
    "is_cuda",
    "shape",
    "size",
    "numel",
}
_LOOPS = (ast.For, ast.AsyncFor, ast.comprehension)


def borrowed(root: nn.Module) -> dict[int, set[int]]:
    """Map the ``id`` of each parameter to the ``id``s of modules that read it and do not own it."""
    found: dict[int, set[int]] = {}
    for module in root.modules():
        reading = _Reading(module)
        if not _is_torchs(type(module).forward):
            reading.call(type(module).forward, [[module]])
        for parameter in reading.seen:
            found.setdefault(parameter, set()).add(id(module))
    return found


class _Reading:
    """Analysis of one module's forward pass. A name maps to the list of values that it may have."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._entered: set[tuple[int, ...]] = set()
        self._depth = 0
        self.seen: set[int] = set()

    def call(self, function: Any, arguments: Sequence[list[Any]]) -> list[Any]:
        """Analyze ``function`` and return its possible results."""
        function = inspect.unwrap(function)
        key = (id(function), *(id(value) for values in arguments for value in values))
        code = _definition(function) if isinstance(function, FunctionType) else None
        if code is None or key in self._entered or self._depth == _MOST_CALLS:
            return []
        self._entered.add(key)
        self._depth += 1
        names = [argument.arg for argument in (*code.args.posonlyargs, *code.args.args)]
        frame = _Frame(self, function, dict(zip(names, arguments, strict=False)))
        for _ in range(2):  # In a loop, a line may read a name that a later line binds.
            frame.run(code.body)
        self._depth -= 1
        return frame.returned

    def attribute(self, base: Any, name: str, *, read: bool) -> list[Any]:
        """Return the possible values of ``base.name``, and record a parameter of another module."""
        if not isinstance(base, nn.Module):
            return []
        if (parameter := base._parameters.get(name)) is not None:
            if read and base is not self._module:
                self.seen.add(id(parameter))
            return [parameter]
        if (part := base._modules.get(name)) is not None:
            return [part]
        if name in base.__dict__:
            return [base.__dict__[name]]
        kind = inspect.getattr_static(type(base), name, None)
        if isinstance(kind, property):
            return self.call(kind.fget, [[base]])
        own = isinstance(kind, FunctionType) and not _is_torchs(kind)
        return [MethodType(kind, base)] if own else []


class _Frame:
    """One call of a function: its local names and its possible results."""

    def __init__(
        self, reading: _Reading, function: FunctionType, names: dict[str, list[Any]]
    ) -> None:
        self._reading, self._function, self._names = reading, function, names
        self.returned: list[Any] = []

    def run(self, nodes: Iterable[ast.AST]) -> None:
        """Analyze statements and other nodes that have no value."""
        for node in nodes:
            if isinstance(node, ast.expr):
                self._value(node)
            elif isinstance(node, ast.Assign):
                value = self._value(node.value)
                for target in node.targets:
                    self._bind(target, value)
            elif isinstance(node, ast.Return):
                self.returned += [] if node.value is None else self._value(node.value)
            elif isinstance(node, _LOOPS):
                self._bind(node.target, _members(self._value(node.iter)))
                self.run(ast.iter_child_nodes(node))
            else:
                self.run(ast.iter_child_nodes(node))

    def _bind(self, target: ast.expr, value: list[Any]) -> None:
        """Add ``value`` to the possible values of each name in ``target``."""
        for node in ast.walk(target):
            if isinstance(node, ast.Name):
                held = self._names.setdefault(node.id, [])
                held += [one for one in value if not any(one is other for other in held)]

    def _value(self, node: ast.expr, *, read: bool = True) -> list[Any]:
        if isinstance(node, ast.Name):
            known = self._function.__globals__.get(node.id)
            own = isinstance(known, FunctionType) and not _is_torchs(known)
            found = [known] if own else []
            return self._names.get(node.id, found)
        if isinstance(node, ast.Attribute):
            if _is_super(node.value):
                return self._inherited(node.attr)
            bases = self._value(node.value, read=node.attr not in _SAME_IN_SHARD)
            return [
                value
                for base in bases
                for value in self._reading.attribute(base, node.attr, read=read)
            ]
        if isinstance(node, ast.Subscript):
            self._value(node.slice)
            return _members(self._value(node.value))
        if isinstance(node, ast.Call):
            return self._called(node)
        if isinstance(node, ast.NamedExpr):
            value = self._value(node.value)
            self._bind(node.target, value)
            return value
        # A comprehension's element comes before the loops that bind its names.
        parts = sorted(ast.iter_child_nodes(node), key=lambda part: isinstance(part, ast.expr))
        self.run(part for part in parts if not isinstance(part, ast.expr))
        return [
            value for part in parts if isinstance(part, ast.expr) for value in self._value(part)
        ]

    def _called(self, node: ast.Call) -> list[Any]:
        arguments = [self._value(argument) for argument in node.args]
        self.run(keyword.value for keyword in node.keywords)
        functions = self._value(node.func)
        if not functions:
            # enumerate(self.blocks) or self.blocks.values(): assume the call returns its arguments.
            of = self._value(node.func.value) if isinstance(node.func, ast.Attribute) else []
            return _members([value for values in (of, *arguments) for value in values])
        returned: list[Any] = []
        for function in functions:
            if isinstance(function, MethodType):
                returned += self._reading.call(function.__func__, [[function.__self__], *arguments])
            elif isinstance(function, FunctionType):
                returned += self._reading.call(function, arguments)
        return returned

    def _inherited(self, name: str) -> list[Any]:
        """Return the possible values of ``super().name``: any method of this name but the current one."""
        return [
            MethodType(kind.__dict__[name], owner)
            for owner in self._names.get("self", [])
            for kind in type(owner).__mro__
            if isinstance(kind.__dict__.get(name), FunctionType)
            and not _is_torchs(kind.__dict__[name])
            and kind.__dict__[name] is not self._function
        ]


@functools.cache
def _definition(function: FunctionType) -> ast.FunctionDef | None:
    """Return the syntax tree of ``function``; None if its source is unavailable."""
    try:
        (node,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
    except (OSError, SyntaxError, TypeError, ValueError):
        return None
    return node if isinstance(node, ast.FunctionDef) else None


def _is_torchs(function: Any) -> bool:
    return (getattr(function, "__module__", None) or "").partition(".")[0] == "torch"


def _is_super(node: ast.expr) -> bool:
    return (
        isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"
    )


def _members(values: list[Any]) -> list[Any]:
    """Return ``values`` and the elements of any lists among them."""
    found = list(values)
    for value in values:
        if isinstance(value, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            found += value._modules.values()
        elif isinstance(value, list | tuple):
            found += value
        elif isinstance(value, dict):
            found += value.values()
    return found
