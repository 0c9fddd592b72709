"""The files for contributors and CI: they parse, and name programs, versions and files that exist."""

import re
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
WORKFLOW: dict[Any, Any] = yaml.safe_load(
    (ROOT / ".github" / "workflows" / "tests.yml").read_text(encoding="utf-8")
)


def commands(job: str) -> list[str]:
    """Return the shell commands of a job of the workflow."""
    return [step["run"] for step in WORKFLOW["jobs"][job]["steps"] if "run" in step]


def test_the_unit_tests_run_on_every_supported_python() -> None:
    versions = WORKFLOW["jobs"]["unit"]["strategy"]["matrix"]["python-version"]
    assert versions == ["3.10", "3.11", "3.12", "3.13"]
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert f'requires-python = ">={versions[0]}"' in project
    for job in ("lint", "unit"):
        assert 'python -m pip install -c constraints.txt -e ".[dev]"' in commands(job)


def test_the_lint_job_runs_the_checks_of_the_style_script() -> None:
    script = (ROOT / "tools" / "style.sh").read_text(encoding="utf-8")
    checks = re.findall(
        r"^(?:python tools/prose|codespell|ruff|mypy|lint-imports).*$", script, re.MULTILINE
    )
    assert checks == commands("lint")[1:]


def test_the_slurm_job_runs_the_ci_script_as_root() -> None:
    job = WORKFLOW["jobs"]["slurm"]
    assert "--privileged" in job["container"]["options"]
    assert commands("slurm")[-1] == "bash .ci/run"
    assert (ROOT / ".ci" / "run").is_file()


def test_the_readme_names_both_commands_of_a_checkout() -> None:
    page = (ROOT / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^bash (tools/\S+) +# \w", page, re.MULTILINE)
    assert commands == ["tools/quickstart.sh", "tools/test.sh"]
    assert [name for name in commands if not (ROOT / name).is_file()] == []


def test_the_fast_lane_names_tests_that_exist() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"^python -m pytest -n 0 ((?:tests/\S+[ \\\n]*){3,})", page, re.MULTILINE)
    paths = names.replace("\\\n", " ").split()
    assert [name for name in paths if not (ROOT / name).exists()] == []
