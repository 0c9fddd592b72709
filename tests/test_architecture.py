"""The pages for contributors: files, functions, imports and links that they name exist."""

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [
    ROOT / "docs" / "architecture.md",
    ROOT / "docs" / "accelerators.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs" / "decisions").glob("*.md")),
    *sorted((ROOT / ".github").rglob("*.md")),
]
FOLDERS = "hpcrun|tests|tools|docs|configs|sbatch|\\.ci|\\.github"
REFERENCE = re.compile(rf"`((?:{FOLDERS})/[\w./-]*)(?::([\w.]+))?`")
# Open to every package.
SHARED = {"descendants", "drafts", "errors", "exit_codes", "printing"}


def code(page: Path) -> str:
    """Return the text of ``page`` without its code blocks."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)


def references() -> list[tuple[str, str, str | None]]:
    """Return each file that a page names, with the function, class or constant in it."""
    return [
        (page.relative_to(ROOT).as_posix(), path, name or None)
        for page in PAGES
        for path, name in REFERENCE.findall(code(page))
    ]


def test_a_walk_names_at_most_eight_files() -> None:
    walks = re.split(r"^## ", code(ROOT / "docs" / "architecture.md"), flags=re.M)
    files = {
        walk.partition("\n")[0]: {
            path for path, _ in REFERENCE.findall(walk) if path.endswith(".py")
        }
        for walk in walks
        if walk.startswith("Walk ")
    }
    assert len(files) == 9
    assert {walk: len(found) for walk, found in files.items() if len(found) > 8} == {}


@functools.cache
def names_in(path: str) -> set[str]:
    """Return the names that a module defines: ``function``, ``CONSTANT``, ``Class``, ``Class.method``."""
    found: set[str] = set()

    def collect(body: list[ast.stmt], prefix: str) -> None:
        for node in body:
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                found.add(prefix + node.name)
            elif isinstance(node, ast.ClassDef):
                found.add(prefix + node.name)
                collect(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.Assign):
                found.update(prefix + one.id for one in node.targets if isinstance(one, ast.Name))
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                found.add(prefix + node.target.id)

    collect(ast.parse((ROOT / path).read_text(encoding="utf-8")).body, "")
    return found


def test_every_file_and_function_that_a_page_names_exists() -> None:
    missing = [
        (page, path, name)
        for page, path, name in references()
        if not (ROOT / path).exists() or (name and name not in names_in(path))
    ]
    assert not missing
    assert sum(page == "docs/architecture.md" for page, _, _ in references()) > 80


def packages() -> set[str]:
    """Return the packages below ``hpcrun/``."""
    return {path.parent.name for path in ROOT.glob("hpcrun/*/__init__.py")}


def allowed_imports() -> dict[str, set[str]]:
    """Return the table of docs/architecture.md: the packages that each package may import."""
    rows = re.findall(r"^\| `(\w+)` \| .* \| (.*) ?\|$", code(PAGES[0]), re.MULTILINE)
    every = packages()
    return {
        name: every - {name, "train"}
        if "every package" in cell
        else set(re.findall(r"`(\w+)`", cell))
        for name, cell in rows
    }


def imported_packages(package: str) -> set[str]:
    """Return the packages of hpcrun that the modules of ``package`` import directly."""
    found: set[str] = set()
    for path in (ROOT / "hpcrun" / package).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module == "hpcrun":
                modules = [f"hpcrun.{alias.name}" for alias in node.names]
            else:
                modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found |= {name.split(".")[1] for name in modules if name.startswith("hpcrun.")}
    return (found & packages()) - {package} - SHARED


def test_the_table_of_packages_is_complete() -> None:
    assert set(allowed_imports()) == packages()


@pytest.mark.parametrize("package", sorted(packages()))
def test_a_package_imports_what_the_table_allows(package: str) -> None:
    assert imported_packages(package) <= allowed_imports()[package]


def test_every_cited_invariant_is_in_the_list() -> None:
    section = code(PAGES[0]).split("## Invariants")[1].split("\n## ")[0]
    numbers = [int(number) for number in re.findall(r"^(\d+)\. ", section, re.MULTILINE)]
    assert numbers == list(range(1, 11))
    cited = {
        int(number)
        for folder in ("hpcrun", "tests", "tools")
        for path in (ROOT / folder).rglob("*.py")
        for number in re.findall(r"\(invariant (\d+)\)", path.read_text(encoding="utf-8"))
    }
    assert cited <= set(numbers)


def documents() -> list[Path]:
    """Return every Markdown file of the repository."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("no git checkout")
    return [ROOT / name for name in listed.stdout.split() if (ROOT / name).exists()]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", code(page), re.MULTILINE)
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings
    }


def test_every_link_leads_to_a_page_and_a_heading() -> None:
    broken = []
    for page in documents():
        for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", code(page)):
            if re.match(r"\w+:", target):
                continue
            file, _, anchor = target.partition("#")
            path = (page.parent / file).resolve() if file else page
            whole = path.exists() and (not anchor or anchor in anchors(path))
            if not whole:
                broken.append((page.relative_to(ROOT).as_posix(), target))
    assert not broken


def test_the_lists_name_every_page() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    pages = [f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")]
    assert [name for name in pages if f"]({name}" not in readme] == []
    records = ROOT / "docs" / "decisions"
    index = (records / "README.md").read_text(encoding="utf-8")
    names = [path.name for path in records.glob("[0-9]*.md")]
    assert names
    assert [name for name in names if f"]({name})" not in index] == []


def test_tests_import_no_private_name_of_hpcrun() -> None:
    # ruff's SLF001 finds private attributes.
    imported = re.compile(r"^ *from hpcrun\S* import [^#\n]*\b_\w", re.MULTILINE)
    paths = [*(ROOT / "tests").rglob("*.py")]
    assert [path for path in paths if imported.search(path.read_text(encoding="utf-8"))] == []


def imports(path: Path) -> list[tuple[str, str]]:
    """Return each module of hpcrun and each name that a file takes from it."""
    return [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("hpcrun.")
        for alias in node.names
    ]


def test_tools_import_names_that_hpcrun_has() -> None:
    # mypy does not read them, and most of their tests are slow.
    lacking = []
    for tool in sorted((ROOT / "tools").rglob("*.py")):
        for module, name in imports(tool):
            place = ROOT.joinpath(*module.split("."))
            # A package may compute its names.
            if not place.is_dir():
                path = place.with_suffix(".py")
                known = path.exists() and {*names_in(str(path.relative_to(ROOT)))}
                if not known or name not in known | {one for _, one in imports(path)}:
                    lacking.append(f"{tool.relative_to(ROOT)}: {module}.{name}")
    assert lacking == []


def test_each_class_name_is_used_once() -> None:
    places: dict[str, list[str]] = {}
    for path in sorted((ROOT / "hpcrun").rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(path.relative_to(ROOT).as_posix())
    # Users import the callback from the module of their framework.
    del places["ExactResume"]
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


HOMES = {
    "DataLoader": {"hpcrun/train/data/positioned.py"},
    "require_restored": {"hpcrun/checkpoint/saver.py"},
    "setstate": {"hpcrun/checkpoint/state/generators.py"},
    "set_rng_state": {"hpcrun/checkpoint/state/generators.py", "hpcrun/devices/accelerator.py"},
}
"""What makes a loader, starts a save and restores random generators, and the only modules that call it."""


def test_each_part_of_the_engine_has_one_home() -> None:
    places: dict[str, set[str]] = {name: set() for name in HOMES}
    for path in sorted((ROOT / "hpcrun").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                if name in HOMES:
                    places[name].add(path.relative_to(ROOT).as_posix())
    assert places == HOMES


def test_names_of_tests_have_at_most_ten_words() -> None:
    long = [
        f"{path.relative_to(ROOT)}: {node.name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef)
        and node.name.startswith("test_")
        and node.name.count("_") > 10
    ]
    assert not long
