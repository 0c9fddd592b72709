"""The search for add-ons of other packages, from the metadata on sys.path."""

import sys
from pathlib import Path

import pytest

from hpcrun.cli import added_commands
from hpcrun.cli.main import COMMANDS, guarded, usage
from hpcrun.errors import UserError
from hpcrun.ports.entry_points import NODE_CHECKS, SINKS, STRATEGIES, Port
from tests.support.add_ons import install

WORKS = """
def add_arguments(parser):
    parser.add_argument("word")
def run(arguments):
    print(arguments.word)
    return 7
"""
REFUSES = """
from hpcrun import UserError
def add_arguments(parser):
    pass
def run(arguments):
    raise UserError("greet: no; say please")
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder on sys.path."""
    monkeypatch.syspath_prepend(tmp_path / "site")
    return tmp_path / "site"


def with_command(site: Path, module: str, text: str) -> None:
    install(site, f"of-{module}", {"hpcrun.commands": {"greet": module}}, **{module: text})


def test_a_command_of_a_package_runs_and_is_listed(
    site: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_command(site, "greets", WORKS)
    assert "  greet       of-greets 1.0: for a test" in usage()
    assert guarded(["greet", "moin"]) == 7
    assert capsys.readouterr().out == "moin\n"
    assert guarded(["gret"]) == 2
    assert "did you mean greet?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "text", "line"),
    [
        ("refusing", REFUSES, "hpcrun: greet: no; say please"),
        (
            "missing",
            "import not_installed_here",
            "hpcrun: greet: the command of the package of-missing cannot be imported from missing: "
            "ModuleNotFoundError: No module named 'not_installed_here'; repair the package, or uninstall it",
        ),
        (
            "halved",
            "def run(arguments): return 0",
            "hpcrun: greet: the command of the package of-halved has no function add_arguments; repair the "
            "package, or uninstall it",
        ),
    ],
)
def test_a_failure_of_a_command_is_one_line(
    site: Path, capsys: pytest.CaptureFixture[str], module: str, text: str, line: str
) -> None:
    with_command(site, module, text)
    assert guarded(["greet"]) == 2
    assert capsys.readouterr().err == f"{line}\n"
    # The help imports no package, so a broken package does not hurt it.
    assert f"of-{module}" in usage()


def test_no_package_replaces_a_command_of_hpcrun(site: Path) -> None:
    install(site, "bold", {"hpcrun.commands": {"status": "bold"}}, bold=WORKS)
    assert added_commands.added_port(COMMANDS).of_packages() == []
    assert "bold" not in usage()


def test_two_packages_with_one_name_are_both_named(site: Path) -> None:
    for name in ("one", "two"):
        install(site, name, {"hpcrun.sinks": {"csv": f"{name}:Sink"}})
    with pytest.raises(UserError, match="csv: one and two both have a metric sink"):
        SINKS.load("csv")


def test_damaged_metadata_costs_no_other_package(site: Path) -> None:
    install(site, "sound", {"hpcrun.strategies": {"stay": "sound:stay"}}, sound="stay = len")
    install(site, "damaged", {})
    (site / "damaged-1.0.dist-info" / "entry_points.txt").write_bytes(
        b"[hpcrun.strategies]\n\xff\n"
    )
    assert STRATEGIES.load("stay") is len


def test_an_unknown_name_has_a_remedy(site: Path) -> None:
    with pytest.raises(
        UserError, match="loads: no such check of nodes; no installed package has one"
    ):
        NODE_CHECKS.find("loads")
    with pytest.raises(UserError, match="did you mean wandb"):
        SINKS.find("wanbd")


@pytest.mark.parametrize("port", [SINKS, STRATEGIES])
def test_each_own_name_stands_for_something(port: Port) -> None:
    assert all(callable(port.load(name)) for name in port.own)


def test_a_name_of_hpcrun_reads_no_metadata(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "importlib.metadata", None)
    assert callable(STRATEGIES.load("in-place"))
