"""Conditions on the values of an element, such as ``optim.name != 'sgd' or train.lr > 1e-3``.

The expressions are a small part of Python's: names of keys, constants, comparisons, ``in``, ``and``, ``or``,
``not``, and + - * /. Nothing else is evaluated: a file of a sweep runs no code.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any

from hpcrun.api.sweeps.rows import Condition, Row, refusal

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_ARITHMETIC: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_SHORT = 60


def parsed(condition: Condition) -> ast.expr:
    """Return the expression of ``condition``.

    Raises:
        ConfigError: the text is not an expression.
    """
    try:
        return ast.parse(condition.text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise refusal(
            condition.place,
            "where",
            f"{condition.text[:_SHORT]!r} is not an expression; write one such as train.lr < 1e-3",
        ) from None


def holds(condition: Condition, expression: ast.expr, row: Row) -> bool:
    """Return True if ``row`` meets the condition.

    Raises:
        ConfigError: the expression names a key that the sweep lacks, or contains an operation that is not
        allowed.
    """
    values = {key: given.value for key, given in row.items()}
    try:
        return bool(_value(expression, values))
    except _BadExpression as error:
        text = f"{condition.text[:_SHORT]!r}: {error}"
    except (TypeError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        text = f"{condition.text[:_SHORT]!r} cannot be computed: {error}"
    raise refusal(condition.place, "where", text)


class _BadExpression(Exception):
    """An expression that is not allowed; the text names its part."""


def _value(node: ast.expr, values: Mapping[str, Any]) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.Name | ast.Attribute):
        return _key(node, values)
    if isinstance(node, ast.BoolOp):
        # As in Python, the second part is not evaluated if the first decides.
        both = all if isinstance(node.op, ast.And) else any
        return both(_value(part, values) for part in node.values)
    if isinstance(node, ast.UnaryOp):
        return _unary(node, values)
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        return _computed(node, values)
    if isinstance(node, ast.Compare):
        return _compared(node, values)
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(part, values) for part in node.elts]
    raise _BadExpression(f"{ast.unparse(node)!r} is not allowed; use keys, values and comparisons")


def _unary(node: ast.UnaryOp, values: Mapping[str, Any]) -> Any:
    value = _value(node.operand, values)
    return not value if isinstance(node.op, ast.Not) else -value


def _computed(node: ast.BinOp, values: Mapping[str, Any]) -> Any:
    left, right = _value(node.left, values), _value(node.right, values)
    # 'a' * 10**9 would fill the memory.
    if not all(isinstance(side, int | float) for side in (left, right)):
        raise _BadExpression("only numbers can be added or multiplied")
    return _ARITHMETIC[type(node.op)](left, right)


def _compared(node: ast.Compare, values: Mapping[str, Any]) -> bool:
    left = _value(node.left, values)
    for kind, part in zip(node.ops, node.comparators, strict=True):
        if type(kind) not in _COMPARE:
            raise _BadExpression(f"{ast.unparse(node)!r} is not allowed; compare with == or !=")
        right = _value(part, values)
        if not _COMPARE[type(kind)](left, right):
            return False
        left = right
    return True


def _key(node: ast.Name | ast.Attribute, values: Mapping[str, Any]) -> Any:
    key = ast.unparse(node)
    if key not in values:
        raise _BadExpression(f"{key} is not a key of the sweep; its keys: {', '.join(values)}")
    return values[key]
