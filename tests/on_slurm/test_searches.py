"""A multirun of hydra and a search with Optuna on a real Slurm."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import pytest

from hpcrun.run.files import read_lines
from tests.api.sweeps import test_study as search
from tests.slurm.launch.test_killed_sweep import KILLED

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

BAD, PREEMPTED = [5, 9, 13, 17, 21, 25], [3, 7, 15, 23]


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


def test_thirty_trials_survive_preemptions_prunings_and_two_kills(bench: Bench) -> None:
    kinds = ["bad" if number in BAD else "good" for number in range(30)]
    for number in PREEMPTED:
        kinds[number] = "preempted"
    search.prepare(bench.folder, kinds)
    user = bench.slurm.shared.stat()
    for path in [bench.folder, *bench.folder.rglob("*")]:
        os.chown(path, user.st_uid, user.st_gid)
    words = (*search.WORDS[:5], "--executor", "slurm", "--mem", "1G", "--max-parallel", "4")
    words += search.WORDS[7:]
    # Between the question and the submission, and between the submission and its record.
    for module, name, call in (
        ("sweeps.study", "submit_sweep", 8),
        ("submission.sending", "Journal", 9),
    ):
        killed = [sys.executable, "-c", KILLED, f"hpcrun.api.{module}", name, str(call)]
        first = bench.slurm.popen([*killed, *words], cwd=bench.folder, env=bench.environ())
        preempt(bench, first)
        shown, errors = first.communicate(timeout=PATIENCE)
        assert first.returncode == -signal.SIGKILL, shown + errors
    last = bench.slurm.popen(bench.command(*words), cwd=bench.folder, env=bench.environ())
    preempt(bench, last)
    shown, errors = last.communicate(timeout=PATIENCE)
    assert last.returncode == 0, shown + errors
    assert "s: 30 trials: 24 complete, 6 pruned" in shown
    found = search.trials(bench.folder)
    pruned = [trial.number for trial in found if trial.state.name == "PRUNED"]
    assert (len(found), pruned) == (30, BAD)
    starts = search.began(bench.folder)
    twice = [f"{number:03d} {restart}" for number in PREEMPTED for restart in (0, 1)]
    once = [f"{number:03d} 0" for number in range(30) if number not in PREEMPTED]
    assert starts == sorted([*once, *twice])
    runs = [bench.run(f"s/{number:03d}") for number in range(30)]
    states = [bench.result(run)["state"] for run in runs]
    assert states == ["pruned" if number in BAD else "finished" for number in range(30)]
    assert [bench.causes(runs[number]) for number in PREEMPTED] == [["preemption", "finished"]] * 4


def preempt(bench: Bench, running: subprocess.Popen[str]) -> None:
    """Preempt each run that waits for a preemption, until the search ends."""
    asked: set[int] = set()
    late = time.monotonic() + 10 * PATIENCE
    while running.poll() is None:
        assert time.monotonic() < late
        for number in PREEMPTED:
            run = bench.run(f"s/{number:03d}")
            if (
                number not in asked
                and len(read_lines(run.metrics)) == 3
                and not run.result.exists()
            ):
                bench.hpcrun("preempt", f"s/{number:03d}")
                asked.add(number)
        time.sleep(0.5)
