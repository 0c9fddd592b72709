"""Check that a task in a config exists, without importing it (which would import torch)."""

import ast
import difflib
import os
import sys
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from hpcrun.tasks import BUILTIN


def task_path(task: str) -> str:
    """Return ``module:Class`` for a short name or a path.

    Modules are searched as a worker does: in the current folder, then along ``sys.path``.

    Raises:
        ValueError: there is no such task, module or class; the message suggests the nearest name.
    """
    if ":" not in task:
        if task in BUILTIN:
            return BUILTIN[task]
        near = difflib.get_close_matches(task, BUILTIN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are: {', '.join(BUILTIN)}"
        raise ValueError(f"no built-in task is called {task}; {hint} (or write module:Class)")
    module, _, name = task.partition(":")
    source = _source(module)
    if source is not None:
        _require_name(source, module, name)
    return task


def _source(module: str) -> Path | None:
    """Return the module's file, or None if it is not Python source."""
    search: list[str] | None = [os.getcwd(), *sys.path]  # noqa: PTH109
    spec: ModuleSpec | None = None
    parts = module.split(".")
    for depth in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: depth + 1]), search)
        if spec is None:
            place = "." if depth == 0 else ".".join(parts[:depth])
            raise ValueError(
                f"there is no module {'.'.join(parts[: depth + 1])} in {place} or on PYTHONPATH; "
                "submit from the folder that contains it, or set PYTHONPATH"
            )
        search = list(spec.submodule_search_locations or [])
    origin = spec.origin if spec else None
    return Path(origin) if origin and origin.endswith(".py") else None


def _require_name(source: Path, module: str, name: str) -> None:
    try:
        tree = ast.parse(source.read_text(), filename=str(source))
    except SyntaxError as error:
        raise ValueError(
            f"{source}:{error.lineno}: {error.msg}; correct the module first"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{source}: cannot be read: {error}") from error
    names = _defined(tree)
    if name not in names and "*" not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "name one of its classes"
        raise ValueError(f"{source} defines no {name} (module {module}); {hint}")


def _defined(tree: ast.Module) -> list[str]:
    """Return the names that the module may bind at its top level, including in branches."""
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found += [(alias.asname or alias.name).split(".")[0] for alias in node.names]
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
    return found
