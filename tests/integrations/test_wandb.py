"""W&B: one W&B run for all attempts, and a sweep's trial that continues after an interruption.

No server of W&B takes part: ``AGENT`` sets the environment as ``wandb.agent`` does for a trial.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hpcrun.integrations.wandb import continue_wandb_run
from hpcrun.run.directory import RunDirectory
from hpcrun.run.record import wandb_id

AGENT = """
import os, pathlib, sys, threading
from hpcrun.integrations.wandb import main

def agent(sweep, function, count):
    for number in range(count):
        name = f"trial{len(list(pathlib.Path().glob('config-*')))}"
        path = pathlib.Path(f"config-{name}.yaml").absolute()
        path.write_text(f"wandb_version: 1\\nlr:\\n  value: 0.{len(name) + number}\\n")
        os.environ.update(WANDB_RUN_ID=name, WANDB_SWEEP_ID=sweep, WANDB_SWEEP_PARAM_PATH=str(path))
        trial = threading.Thread(target=function)
        trial.start()
        trial.join()

main(sys.argv[1:], agent)
"""

TRIAL = """
import json, os, pathlib
names = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SWEEP_ID")
line = [os.environ[name] for name in names]
line.append(pathlib.Path(os.environ["WANDB_SWEEP_PARAM_PATH"]).read_text().split()[-1])
with open("trials.jsonl", "a") as stream:
    print(json.dumps(line), file=stream)
codes = pathlib.Path("codes")
code, *rest = codes.read_text().split()
codes.write_text(" ".join(rest))
raise SystemExit(int(code))
"""


def started(folder: Path, trial: str, *, count: int) -> subprocess.CompletedProcess[str]:
    """Run an attempt of the agent in the run directory ``folder``."""
    command = [sys.executable, "-c", AGENT, "sweep7", "--count", str(count), "--"]
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "SLURM"))}
    return subprocess.run(
        [*command, sys.executable, "-c", trial],
        cwd=folder,
        env={**environment, "HPCRUN_RUN": str(folder), "WANDB_MODE": "offline", "WANDB_SILENT": "true"},
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_an_interrupted_trial_continues_as_the_same_run(tmp_path: Path) -> None:
    (tmp_path / "codes").write_text("0 75 75 3 0")
    first = started(tmp_path, TRIAL, count=4)
    assert first.returncode == 75, first.stderr
    # The file of W&B's agent is on the old node.
    (tmp_path / "config-trial1.yaml").write_text("lost\n")
    assert started(tmp_path, TRIAL, count=4).returncode == 75
    last = started(tmp_path, TRIAL, count=3)
    assert last.returncode == 0, last.stderr
    assert "trial trial1 continues as the same W&B run" in last.stderr
    assert "the trial ended with exit code 3; the agent continues" in last.stderr
    lines = [json.loads(line) for line in (tmp_path / "trials.jsonl").read_text().splitlines()]
    assert lines == [
        ["trial0", "allow", "sweep7", "0.6"],
        *([["trial1", "allow", "sweep7", "0.7"]] * 3),
        ["trial2", "allow", "sweep7", "0.6"],
    ]
    assert json.loads((tmp_path / "wandb-trial.json").read_text())["finished"] == 3
    assert started(tmp_path, TRIAL, count=3).returncode == 0


def test_wandb_writes_both_parts_of_a_trial_into_one_run(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    (tmp_path / "codes").write_text("75 0")
    logs = "import wandb\nrun = wandb.init()\nrun.log({'lr': run.config.lr})\nrun.finish()\n"
    assert started(tmp_path, logs + TRIAL, count=1).returncode == 75
    last = started(tmp_path, logs + TRIAL, count=1)
    assert last.returncode == 0, last.stderr
    found = [path.name.split("-")[-1] for path in (tmp_path / "wandb").glob("offline-run-*")]
    assert found == ["trial0"] * len(found) != []


def test_all_attempts_of_a_script_are_one_wandb_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_RUN_ID", "WANDB_RESUME", "HPCRUN_RUN", "RANK"):
        monkeypatch.delenv(name, raising=False)
    continue_wandb_run()
    assert "WANDB_RUN_ID" not in os.environ
    monkeypatch.setenv("HPCRUN_RUN", str(tmp_path))
    monkeypatch.setenv("RANK", "1")
    continue_wandb_run()
    assert "WANDB_RUN_ID" not in os.environ
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WANDB_RESUME", "must")
    continue_wandb_run()
    assert os.environ["WANDB_RUN_ID"] == wandb_id(RunDirectory(tmp_path))
    assert os.environ["WANDB_RESUME"] == "must"
    monkeypatch.setenv("WANDB_RUN_ID", "mine")
    continue_wandb_run()
    assert os.environ["WANDB_RUN_ID"] == "mine"


def test_the_agent_refuses_several_ranks_and_other_places(tmp_path: Path) -> None:
    def refused(**environment: str) -> str:
        command = [sys.executable, "-m", "hpcrun.integrations.wandb", "sweep7", "--", "true"]
        clean = {k: v for k, v in os.environ.items() if k not in ("HPCRUN_RUN", "WORLD_SIZE")}
        done = subprocess.run(
            command, env=clean | environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 2
        return done.stderr

    assert "start the agent with `hpcrun submit" in refused()
    assert "each rank would be an agent" in refused(HPCRUN_RUN=str(tmp_path), WORLD_SIZE="2")
