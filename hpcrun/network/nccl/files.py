"""Read the variables that a file sets: a script, Python, YAML, JSON, a Dockerfile, a list or a log."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import yaml

from hpcrun.errors import UserError
from hpcrun.network.nccl.lint import NcclFinding
from hpcrun.network.nccl.rules import Setting, is_of_network
from hpcrun.network.nccl.scripts import Script, export_lists, known_value, lines_of, read_script

_MOST_BYTES = 1 << 20
_ENV_KEYS = re.compile(
    r"env|envs|env_?vars?|environment(_variables)?|runtime_env|variables", re.IGNORECASE
)
_DEEPEST = 100


@dataclass(frozen=True)
class Reading:
    """The settings of a file, and the findings about its lines."""

    settings: tuple[Setting, ...] = ()
    findings: tuple[NcclFinding, ...] = ()


def read_file(path: Path) -> Reading:
    """Return the settings of a file, and the findings about its lines.

    Raises:
        UserError: the file is larger than 1 MiB, and no log of NCCL.
    """
    with path.open("rb") as file:
        start = file.read(_MOST_BYTES + 1)
    text = start.decode("utf-8", errors="replace")
    if len(start) > _MOST_BYTES and "NCCL INFO" not in text:
        raise UserError(f"{path}: is larger than 1 MiB; name a script or a config")
    if path.suffix.lower() in (".yaml", ".yml", ".json", ".jsonl"):
        found = _of_yaml(text, str(path))
        if found is None:
            # A template of YAML: no shell reads its lines as they are.
            read = read_text(text, str(path), path.parent)
            errors = tuple(one for one in read.findings if one.level == "error")
            found = replace(read, findings=errors)
        return found
    if path.suffix.lower() == ".py":
        settings = _of_python(text, str(path))
        if settings is not None:
            return Reading(tuple(settings))
    return read_text(text, str(path), path.parent)


def read_text(text: str, name: str, folder: Path | None = None) -> Reading:
    """Return the settings of a script, and the findings about its lines.

    Args:
        text: the script.
        name: of the script for the place of a setting.
        folder: of the files that the script names; None: such files are not read.
    """
    script = read_script(text, name)
    settings = [*script.settings]
    for file, _ in script.env_files if folder is not None else ():
        assert folder is not None
        settings += _of_env_file(folder / file, file)
    found = export_findings(text, name)
    found += [NcclFinding("error", one, words, "bash") for one, words in script.broken]
    found += _not_exported(script, text)
    return Reading(tuple(settings), tuple(found))


def export_findings(text: str, name: str) -> list[NcclFinding]:
    """Return a finding for each ``--export=A=b,c``: Slurm cuts the value at its comma."""
    findings = []
    for place, line in lines_of(text):
        for words in export_lists(line):
            for (one, value), (rest, of_rest) in pairwise(words):
                # In capitals, the word is a variable to pass on (PATH), not the rest of a value (mlx5_1).
                if value is None or of_rest is not None or re.fullmatch(r"[A-Z_][A-Z0-9_]*", rest):
                    continue
                message = (
                    f"--export cuts the value at its comma: the job gets {value!r} and not {rest!r}; "
                    "write `export` lines in the script"
                )
                setting = Setting(one, value, f"{name}:{place}")
                findings.append(NcclFinding("error", setting, message, "srun"))
    return findings


def _not_exported(script: Script, text: str) -> list[NcclFinding]:
    """Return a finding for each variable that stays in the shell: assigned, and never exported or used.

    A file that only has assignments is a list for a container or for NCCL, where no shell reads it.
    """
    if script.exports_all or not script.commands:
        return []
    named = {one.name for one in script.settings if one not in script.plain} | script.exported
    message = "is not exported, so that programs do not see it; write `export`"
    return [
        NcclFinding("warning", one, message, "bash")
        for one in script.plain
        if is_of_network(one.name)
        and one.name not in named
        and not re.search(rf"\$\{{?{one.name}\b", text)
    ]


def _of_env_file(path: Path, name: str) -> list[Setting]:
    """Return the settings of docker's --env-file, which knows no quotes; none if it cannot be read."""
    try:
        with path.open("rb") as file:
            lines = file.read(_MOST_BYTES).decode("utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [
        Setting(key.strip(), value, f"{name}:{place}", of_command=True)
        for place, line in enumerate(lines, start=1)
        for key, equals, value in [line.partition("=")]
        if equals and not line.lstrip().startswith("#") and is_of_network(key.strip())
    ]


def _of_yaml(text: str, name: str) -> Reading | None:
    """Return the settings of all documents; None if the text is no YAML, such as a template."""
    try:
        documents = list(yaml.compose_all(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)))
    except (yaml.YAMLError, RecursionError):
        return None
    walk = _Walk(name)
    for document in documents:
        if document is not None:
            walk.visit(document, "", 0)
    return Reading(tuple(walk.settings), tuple(walk.findings))


class _Walk:
    """Collects the variables of YAML: mappings and lists of an ``env`` key, and scripts in texts."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._seen: set[int] = set()
        self.settings: list[Setting] = []
        self.findings: list[NcclFinding] = []

    def visit(self, node: yaml.Node, key: str, depth: int) -> None:
        """Visit ``node``, which is the value of ``key``. Each node once, so that aliases do not multiply."""
        if id(node) in self._seen or depth > _DEEPEST:
            return
        self._seen.add(id(node))
        if isinstance(node, yaml.MappingNode):
            self._mapping(node, key, depth)
        elif isinstance(node, yaml.SequenceNode):
            for one in node.value:
                self.visit(one, key, depth + 1)
        elif isinstance(node, yaml.ScalarNode):
            self._text(node)

    def _mapping(self, node: yaml.MappingNode, key: str, depth: int) -> None:
        pairs = {one.value: value for one, value in node.value if isinstance(one, yaml.ScalarNode)}
        name, value = pairs.get("name"), pairs.get("value")
        if isinstance(name, yaml.ScalarNode) and is_of_network(name.value):
            # A pod's `env:` list. Without a value, it comes from a ConfigMap or a secret.
            self._add(name.value, value if isinstance(value, yaml.ScalarNode) else None, name)
            return
        for one, of_one in node.value:
            word = one.value if isinstance(one, yaml.ScalarNode) else ""
            is_name = word.isupper() or _ENV_KEYS.fullmatch(key)
            if is_name and isinstance(of_one, yaml.ScalarNode) and is_of_network(str(word)):
                self._add(word, of_one, one)
            else:
                self.visit(of_one, str(word), depth + 1)

    def _add(self, name: str, value: yaml.ScalarNode | None, place: yaml.Node) -> None:
        where = f"{self._name}:{place.start_mark.line + 1}"
        text = None if value is None else known_value(str(value.value))
        template = text is not None and "{{" in text
        self.settings.append(Setting(name, None if template else text, where))

    def _text(self, node: yaml.ScalarNode) -> None:
        """Read a text as a script. A text after `|` begins in the next line."""
        text = str(node.value)
        if "=" not in text and "setenv" not in text:
            return
        first = node.start_mark.line + (1 if node.style in ("|", ">") else 0)
        found = read_text("\n" * first + text, self._name)
        self.settings += found.settings
        # One line of a list, or of folded text, is no whole script.
        self.findings += [one for one in found.findings if "\n" in text or one.level == "error"]


def _of_python(text: str, name: str) -> list[Setting] | None:
    """Return the variables that a Python program sets in an environment; None if it cannot be parsed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    found = [
        (line, Setting(key, value, f"{name}:{line}"))
        for node in ast.walk(tree)
        for line, key, value in _python_settings(node)
        if is_of_network(key)
    ]
    return [setting for _, setting in sorted(found, key=lambda one: one[0])]


def _python_settings(node: ast.AST) -> Iterator[tuple[int, str, str | None]]:
    """Yield line, name and value of ``x["A"] = "b"``, ``{"A": "b"}``, ``f("A", "b")`` and ``f(A="b")``."""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            key = _constant(target.slice) if isinstance(target, ast.Subscript) else None
            if key:
                yield node.lineno, key, _constant(node.value)
    elif isinstance(node, ast.Dict):
        for one, value in zip(node.keys, node.values, strict=True):
            key = _constant(one) if one is not None else None
            if key and one is not None:
                yield one.lineno, key, _constant(value)
    elif isinstance(node, ast.Call):
        called = (
            node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        )
        if called in ("setdefault", "putenv", "setenv") and len(node.args) > 1:
            key = _constant(node.args[0])
            if key:
                yield node.lineno, key, _constant(node.args[1])
        for keyword in node.keywords:
            if keyword.arg and keyword.arg.isupper():
                yield keyword.value.lineno, keyword.arg, _constant(keyword.value)


def _constant(node: ast.expr) -> str | None:
    """Return the text of a constant, or of ``str(3)``; None for another value."""
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "str" and len(node.args) == 1:
        node = node.args[0]
    return str(node.value) if isinstance(node, ast.Constant) and node.value is not None else None
