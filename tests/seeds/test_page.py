"""docs/seeds.md names every test of this folder, and every test that it names exists."""

import re
from pathlib import Path

from tests.test_architecture import names_in

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "seeds.md").read_text(encoding="utf-8")
OWN = {
    name: path.name
    for path in sorted(Path(__file__).parent.glob("test_*.py"))
    if path != Path(__file__)
    for name in names_in(path.relative_to(ROOT).as_posix())
    if name.startswith("test_")
}
STATUS = {"as written", "other form", "better form", "GPU", "not ours"}


def rows() -> dict[str, list[list[str]]]:
    """Return the cells of each row of the tables, by the number of the document."""
    found: dict[str, list[list[str]]] = {}
    for part in re.split(r"^## ", PAGE, flags=re.MULTILINE)[1:]:
        lines = [line for line in part.splitlines() if line.startswith("| ")][1:]
        cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
        if part[:3].isdigit():
            found[part[:3]] = cells
    return found


def test_every_test_here_is_in_its_table() -> None:
    for name, file in OWN.items():
        table = "\n".join(row[-1] for row in rows()[file[5:8]])
        assert f"`{name}`" in table, f"{file}: {name} is missing in docs/seeds.md"


def test_every_test_that_the_page_names_exists() -> None:
    for row in (row for table in rows().values() for row in table):
        for path, name in re.findall(r"`(?:(tests/[\w/]+\.py):)?(test_\w+)`", row[-1]):
            assert name in (names_in(path) if path else OWN), f"{path}: {name}"


def test_every_statement_has_a_status_and_a_form() -> None:
    tables = rows()
    assert sorted(tables) == ["000", "001", "002", "003", "004"]
    for row in (row for table in tables.values() for row in table):
        assert len(row) == 4, row
        assert row[1] in STATUS, row
        assert row[0], row
        assert row[2] or row[1] in {"as written", "not ours"}, row
        assert row[3] or row[1] == "not ours", row
    assert sum(map(len, tables.values())) >= 80
