"""hydra's launcher on the local cluster: runs of a multirun, and a multirun that cannot be submitted."""

import inspect
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import hpcrun
from tests.support.jobs import PATIENCE

pytestmark = pytest.mark.skipif(
    find_spec("hydra") is None, reason="hydra-core is not installed: pip install 'hpcrun[search]'"
)
ROOT = Path(__file__).resolve().parents[2]
APP = """
import os
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig


@hydra.main(config_path="conf", config_name="unused", version_base="1.3")
def main(config):
    hydra = HydraConfig.get()
    seen = [config.lr, config.note, hydra.job.num, hydra.mode.name, os.environ["KEY"]]
    (Path(hydra.runtime.output_dir) / "seen").write_text(" ".join(map(str, seen)))
    assert config.lr < 1


main()
"""
# The config asks for a multirun, which a job must not start again.
CONFIG = """\
defaults: [{override hydra/launcher: hpcrun}, _self_]
lr: 0.1
note: none
hydra:
  mode: MULTIRUN
  sweep: {dir: "out/a=b", subdir: "${hydra.job.override_dirname}"}
  launcher: {executor: local, cpu: true, name: search, overrides: {job.env.KEY: "1"}}
"""


def multirun(folder: Path, *overrides: str) -> "subprocess.CompletedProcess[str]":
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "app.py").write_text(APP)
    (folder / "conf" / "search.yaml").write_text(CONFIG)
    return subprocess.run(
        [sys.executable, "app.py", "--config-name", "search", *overrides],
        cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def test_each_job_of_a_multirun_is_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = multirun(tmp_path, "lr=1e-3,2", "note='it''s, {x}'".replace("''", "\\'"))
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first.startswith("search-0  lr=0.001 note=")
    assert second.startswith("search-1  lr=2 note=")
    monkeypatch.chdir(tmp_path)
    runs = [hpcrun.open(f"search-{number}") for number in range(2)]
    assert [run.wait(PATIENCE) for run in runs] == ["finished", "failed"]
    seen = sorted(path.read_text() for path in tmp_path.glob("out/a=b/*/seen"))
    assert seen == ["0.001 it's, {x} 0 RUN 1", "2 it's, {x} 1 RUN 1"]
    done = multirun(tmp_path, "lr=2", "hydra.launcher.wait=true", "hydra.launcher.name=waited")
    assert done.returncode == 1
    assert "waited-0: failed; see `hpcrun doctor waited-0`" in done.stderr


def test_a_refused_submission_is_one_line(tmp_path: Path) -> None:
    done = multirun(tmp_path, "lr=1,2", "+hydra.launcher.overrides={job.imag: a.sif}")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "hpcrun: job 0 of the multirun: overrides=: job.imag: unknown key"
    )
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


def test_the_keys_are_the_arguments_of_submit() -> None:
    from hpcrun.api.submission import choose_config
    from hpcrun.integrations.hydra import OPTIONS

    named = inspect.signature(hpcrun.submit).parameters
    assert {*OPTIONS} <= {*choose_config.OPTIONS, *named}
