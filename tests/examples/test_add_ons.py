"""The example package: installed by pip, each of its add-ons really runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded
from hpcrun.run.files import read_lines
from tests.support import jobs

ROOT = Path(__file__).resolve().parents[2]
CRASHES_ONCE = """\
from pathlib import Path
if not Path("once").exists():
    Path("once").touch()
    raise ValueError("the first time")
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the installed package."""
    folder = tmp_path_factory.mktemp("add-ons")
    # A build writes into its source.
    shutil.copytree(ROOT / "examples" / "add_ons", folder / "source")
    options = ["--no-index", "--no-deps", "--no-build-isolation", "--no-compile", "--quiet"]
    place = ["--disable-pip-version-check", "--target", str(folder / "site")]
    pip = [sys.executable, "-m", "pip", "install", *options, *place, str(folder / "source")]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "site"


@pytest.fixture
def environ(site: Path) -> dict[str, str]:
    return {"PYTHONPATH": os.pathsep.join([str(site), str(ROOT)]), "SCRATCH": "/"}


def test_the_sink_and_the_task_train_by_name(
    site: Path,
    environ: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    keys = ["task=line", "watch.sinks=[csv]", "train.steps=4", "train.log_every=2"]
    words = ["--executor", "local", "--cpu", "--gpus", "1", "--name", "lines", *keys]
    done = jobs.hpcrun("submit", *words, "optim.warmup_steps=1", cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    run = tmp_path / "runs" / "lines"
    losses = {line["step"]: line["loss"] for line in read_lines(run / "metrics.jsonl")}
    written = (line.split(",") for line in (run / "loss.csv").read_text().splitlines())
    assert {int(step): float(loss) for step, loss in written} == pytest.approx(losses, rel=1e-4)

    # The command, in this process.
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)
    assert guarded(["disk", "lines"]) == 0
    assert capsys.readouterr().out.startswith("lines: ")
    assert guarded(["disk", "no-such-run"]) == 2
    refused = capsys.readouterr().err
    assert refused.startswith("hpcrun: no-such-run: no such run")
    assert refused.count("\n") == 1


def test_the_strategy_starts_a_run_again_at_once(environ: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "crash.py").write_text(CRASHES_ONCE)
    words = ["--executor", "local", "--cpu", "--gpus", "1", "--name", "again"]
    key, script = "restarts.strategies=[once-more]", ["--", "python", "crash.py"]
    done = jobs.hpcrun("submit", *words, key, *script, cwd=tmp_path, env=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    (log,) = (tmp_path / "runs" / "again" / "logs").glob("*/controller.log")
    assert "the strategy once-more chooses step: a first crash" in log.read_text()
    # Without the strategy, an attempt that crashes within a minute is requeued.
    assert "starts again at once" in log.read_text()


def test_the_check_decides_about_its_node(environ: dict[str, str], tmp_path: Path) -> None:
    words = ["preflight", "--local", "1", "--gpus", "0", "--check", "scratch"]
    done = jobs.hpcrun(*words, cwd=tmp_path, env=environ | {"SCRATCH": "/no/such/folder"})
    assert done.returncode == 1, done.stdout + done.stderr
    assert (
        "local0: $SCRATCH=/no/such/folder: No such file or directory; mount the disk" in done.stdout
    )
    # With hardware=True, a failure excludes the only node.
    assert "--exclude=local0" in done.stdout


def test_unknown_names_are_refused_at_the_submission(
    environ: dict[str, str], tmp_path: Path
) -> None:
    keys = ["watch.sinks=[cvs]", "restarts.strategies=[once]", "job.node_checks=[scratsch]"]
    words = ["submit", "--dry-run", "--executor", "local", "job.preflight=true", *keys]
    done = jobs.hpcrun(*words, cwd=tmp_path, env=environ)
    assert done.returncode == 2
    lines = done.stderr.splitlines()
    assert ["did you mean" in line for line in lines] == [True] * 3
    assert {line.split(": ")[2] for line in lines} == {
        "watch.sinks",
        "restarts.strategies",
        "job.node_checks",
    }


def test_the_page_shows_the_code_that_runs_here() -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    package = ROOT / "examples" / "add_ons"
    files = [path for path in (package / "hpcrun_example").glob("*.py") if path.stem != "__init__"]
    assert len(files) == 5
    for path in files:
        assert f"```python\n{path.read_text(encoding='utf-8')}```" in page, path.name
    project = (package / "pyproject.toml").read_text(encoding="utf-8")
    assert f"```toml\n{project[project.index('[project]') :]}```" in page
