"""Hooks of mkdocs.yml: pages that are generated from the package, and links that leave docs/.

A page for each command comes from its argparse parser, a page for each public module from ``__all__``. The
README and its relatives become pages too, so that one set of files serves the repository and the site.
"""

import importlib
import io
import re
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from hpcrun.cli.main import COMMANDS, guarded
from hpcrun.config.fields import Section

ROOT = Path(__file__).parents[1]
PAGES = {
    "index.md": "README.md",
    "changelog.md": "CHANGELOG.md",
    "contributing.md": "CONTRIBUTING.md",
    "security.md": "SECURITY.md",
}
MODULES = ("hpcrun", "hpcrun.config", "hpcrun.ports")
_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)#\s]+)(#[^)\s]*)?\)")
# Python's help shows the roles of docstrings, and mkdocstrings does not know them.
_ROLE = re.compile(r":(?:attr|class|func|meth|mod):(?=<code>)")


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    made = {name: _moved(ROOT / source) for name, source in PAGES.items()}
    made |= {f"commands/{name}.md": _command(name) for name in COMMANDS}
    made |= {f"api/{name}.md": _module(name) for name in MODULES}
    for name, text in made.items():
        files.append(File.generated(config, name, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001
    """Point the links of a page at pages of the site."""
    folder = Path(page.file.src_uri).parent
    if page.file.src_uri in PAGES:
        return markdown

    def replaced(found: re.Match[str]) -> str:
        target = (ROOT / "docs" / folder / found[1]).resolve()
        return f"]({_site(target, folder)}{found[2] or ''})"

    return _LINK.sub(replaced, markdown)


def on_page_content(html: str, page: Any, config: Any, files: Files) -> str:  # noqa: ARG001
    """Remove the roles in front of names, such as ``:meth:``."""
    return _ROLE.sub("", html)


def _moved(source: Path) -> str:
    """Return a page of the repository's root with links that hold in the site's root."""
    text = source.read_text(encoding="utf-8")
    return _LINK.sub(
        lambda found: f"]({_site((ROOT / found[1]).resolve(), Path())}{found[2] or ''})", text
    )


def _site(target: Path, folder: Path) -> str:
    """Return the address of a file of the repository, as seen from ``folder`` of the site."""
    up = "../" * len(folder.parts)
    names = {(ROOT / source): page for page, source in PAGES.items()}
    if target in names:
        return up + names[target]
    if target.is_relative_to(ROOT / "docs"):
        return up + target.relative_to(ROOT / "docs").as_posix()
    raise ValueError(f"{target}: a page links to a file outside the site; write its path as code")


def _command(name: str) -> str:
    shown = io.StringIO()
    # argparse ends the process after its help.
    with redirect_stdout(shown), suppress(SystemExit):
        guarded([name, "--help"])
    return f"# hpcrun {name}: {COMMANDS[name]}\n\n```text\n{shown.getvalue().rstrip()}\n```\n"


def _module(name: str) -> str:
    module = importlib.import_module(name)
    lines = [f"# API reference: {name}", "", (module.__doc__ or "").partition("\n")[0], ""]
    homes: dict[str, str] = getattr(module, "_HOMES", {})
    for public in sorted({*module.__all__, *homes}, key=str.lower):
        if public.startswith("_"):
            continue
        home, _, inside = homes.get(public, name).partition(":")
        lines += [f"## {name}.{public}", "", f"::: {home}.{inside or public}", ""]
        lines += _fields(getattr(module, public))
    return "\n".join(lines)


def _fields(public: Any) -> list[str]:
    """Return a table of the fields of a section or a pydantic model, with defaults and descriptions."""
    fields = getattr(public, "model_fields", {})
    if not fields:
        return []
    rows = [
        f"| `{key}` | `{_default(field)}` | {(field.description or '').replace('|', chr(92) + '|')} |"
        for key, field in fields.items()
    ]
    return ["| key | default | meaning |", "|---|---|---|", *rows, ""]


def _default(field: Any) -> str:
    """Return a default in Python's notation; a section shows as ``Name()``."""
    value = field.default
    return f"{type(value).__name__}()" if isinstance(value, Section) else repr(value)
