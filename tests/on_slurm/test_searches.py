"""A multirun of hydra and the search with Optuna of docs/sweeps.md on a real Slurm."""

from __future__ import annotations

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from hpcrun.run.directory import RunDirectory
from tests.integrations import test_optuna as search

from .cluster import PATIENCE
from .training import Bench

pytestmark = [
    *(pytest.mark.slurm, pytest.mark.slow, search.pytestmark),
    pytest.mark.skipif(find_spec("hydra") is None, reason="pip install 'hpcrun[search]'"),
]

APP = """
import os, signal, sys, time
from pathlib import Path
import hydra
from hydra.core.hydra_config import HydraConfig


@hydra.main(config_path=None, version_base="1.3")
def main(config):
    signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
    log = Path(HydraConfig.get().runtime.output_dir) / "log"
    with log.open("a") as lines:
        lines.write(f"{config.lr} restart {os.environ['HPCRUN_RESTART']}\\n")
    if config.lr == 1 and os.environ["HPCRUN_RESTART"] == "0":
        time.sleep(300)


main()
"""


def test_a_preempted_job_of_a_multirun_keeps_its_folder(bench: Bench) -> None:
    (bench.folder / "app.py").write_text(APP)
    launcher = ("executor=slurm", "gpus=1", "cpu=true", "mem=1G", "name=h")
    done = bench.slurm.run(
        [sys.executable, "app.py", "-m", "+lr=1,2", "hydra.sweep.dir=out", "hydra/launcher=hpcrun",
         *(f"hydra.launcher.{one}" for one in launcher)],
        cwd=bench.folder, env=bench.environ(),
    )  # fmt: skip
    assert done.stdout == "h-0  +lr=1\nh-1  +lr=2\n"
    runs = [bench.run("h-0"), bench.run("h-1")]
    log = bench.folder / "out" / "0" / "log"
    bench.wait_until(log.exists, PATIENCE, lambda: bench.story(runs[0]))
    bench.hpcrun("preempt", "h-0")
    for run in runs:
        assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    assert log.read_text() == "1 restart 0\n1 restart 1\n"
    assert (bench.folder / "out" / "1" / "log").read_text() == "2 restart 0\n"


def test_a_search_on_slurm_keeps_its_trials(bench: Bench) -> None:
    search.prepare(bench.folder)
    (bench.folder / "site.yaml").write_text("job: {executor: slurm, cpu: true, mem: 1G}\n")
    user = bench.slurm.shared.stat()
    for path in bench.folder.iterdir():
        os.chown(path, user.st_uid, user.st_gid)
    variables = bench.environ({"HPCRUN_PROFILE": "./site.yaml"})
    running = bench.slurm.popen([sys.executable, "search.py"], cwd=bench.folder, env=variables)
    run = RunDirectory(Path(bench.folder) / "runs" / "lr-2")
    bench.wait_until(run.config.exists, 2 * PATIENCE, lambda: str(running.poll()))
    bench.wait_for_step(run, 20)
    bench.hpcrun("preempt", "lr-2")
    shown, errors = running.communicate(timeout=2 * PATIENCE)
    assert running.returncode == 0, errors
    search.check_trials(bench.folder, shown)
    assert bench.causes(run) == ["preemption", "finished"]
    assert bench.causes(bench.run("lr-1")) == ["cancelled"]
