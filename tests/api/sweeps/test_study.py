"""A search with Optuna on this machine: kills, preemptions, prunings, ends, and what is refused."""

import json
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import hpcrun
from hpcrun.api.sweeps.search import JOURNAL
from hpcrun.run.files import read_lines
from tests.cli.terminal import Terminal
from tests.slurm.launch.test_killed_sweep import KILLED
from tests.support import jobs

pytestmark = pytest.mark.skipif(
    find_spec("optuna") is None, reason="optuna is not installed: pip install 'hpcrun[search]'"
)

SCRIPT = """
import json, os, signal, sys, time
from pathlib import Path
kind, lr, restart = sys.argv[1], float(sys.argv[2]), os.environ["HPCRUN_RESTART"]
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(75))
run = Path(os.environ["HPCRUN_RUN"])
with open("began", "a") as log:
    log.write(f"{run.name} {restart}\\n")
late = time.monotonic() + 600
while Path("hold").exists() and time.monotonic() < late:
    time.sleep(0.05)
if kind == "crashes":
    sys.exit(3)
def log(step, loss):
    with (run / "metrics.jsonl").open("a") as lines:
        lines.write(json.dumps({"step": step, "time": time.time(), "loss": loss}) + "\\n")
if kind == "unknown":
    log(1, None)
    sys.exit()
for step in range(1, 4):
    log(step, 100.0 if kind == "bad" else lr / step)
while (kind == "bad" or kind == "preempted" and restart == "0") and time.monotonic() < late:
    time.sleep(0.05)
"""
SEARCH = """
search:
  trials: {trials}
  metric: loss
  sampler: RandomSampler
  pruner: {{ThresholdPruner: {{upper: 50, n_warmup_steps: 2}}}}
  space:
    kind: [good, bad, preempted, crashes, unknown]
    lr: {{float: {{low: 1e-3, high: 1.0, log: true}}}}
"""
WORDS = (
    *("submit", "--sweep-file", "search.yaml", "--name", "s", "--executor", "local", "--cpu"),
    *("--nodes", "1", "--gpus", "1", "--no-snapshot", "restarts.crash=0", "job.requeue_delay=0.1"),
    *("--", sys.executable, "script.py", "{kind}", "{lr}"),
)


def prepare(folder: Path, kinds: list[str], factor: float = 0.9) -> None:
    """Write the script and the search, and choose the values of its trials."""
    import optuna

    (folder / "script.py").write_text(SCRIPT)
    (folder / "search.yaml").write_text(SEARCH.format(trials=len(kinds)))
    (folder / "runs" / "s").mkdir(parents=True)
    study = optuna.create_study(study_name="s", storage=storage(folder))
    for number, kind in enumerate(kinds):
        study.enqueue_trial({"kind": kind, "lr": 0.1 * factor**number})


def storage(folder: Path) -> Any:
    from optuna.storages.journal import JournalFileBackend, JournalStorage

    return JournalStorage(JournalFileBackend(str(folder / "runs" / "s" / JOURNAL)))


def trials(folder: Path) -> list[Any]:
    import optuna

    return list(optuna.load_study(study_name="s", storage=storage(folder)).trials)


def began(folder: Path) -> list[str]:
    """Return a line for each start: the run and the number of its restart."""
    return sorted((folder / "began").read_text().splitlines())


def killed_at(folder: Path, module: str, name: str, call: int) -> None:
    """Run the search, and kill it at a call of a function."""
    packages = {"stopping": "hpcrun.slurm.launch", "sending": "hpcrun.api.submission"}
    package = packages.get(module, "hpcrun.api.sweeps")
    words = [sys.executable, "-c", KILLED, f"{package}.{module}", name, str(call), *WORDS]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


def test_a_search_on_a_terminal_shows_its_trials(tmp_path: Path) -> None:
    prepare(tmp_path, ["good", "crashes"])
    (tmp_path / "hold").touch()
    screen = Terminal(tmp_path, *WORDS)
    try:
        screen.read_until(r"hpcrun: s/000 is submitted: kind=good lr=0\.1")
        screen.read_until(r"s: +0%\|[^\r]*\| 0/2 \[")
        (tmp_path / "hold").unlink()
        screen.read_until(r"\r +\rhpcrun: s/000 is finished: loss=0\.0333333\r\n")
        screen.read_until(r"s: +50%\|[^\r]*\| 1/2 \[")
        screen.read_until(r"hpcrun: best: s/000: loss=0\.0333333 kind=good lr=0\.1\r\n")
        assert screen.end() == 0
        # The bar has gone.
        assert re.search(r"\r *\r$", screen.text), screen.text
    finally:
        screen.kill()


def test_a_killed_search_has_each_trial_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(tmp_path, ["good", "bad", "preempted", "crashes", "good", "unknown"])
    # After the question and before the submission; before the record of the job; before the decision to
    # prune has reached the job; before Optuna knows an end.
    killed_at(tmp_path, "study", "submit_sweep", 1)
    assert [trial.state.name for trial in trials(tmp_path)[:2]] == ["RUNNING", "WAITING"]
    killed_at(tmp_path, "sending", "submit_local", 1)
    killed_at(tmp_path, "sending", "Journal", 1)
    killed_at(tmp_path, "study", "pauses", 2)
    killed_at(tmp_path, "study", "Journal", 1)
    killed_at(tmp_path, "stopping", "cancel", 1)
    monkeypatch.chdir(tmp_path)
    search = subprocess.Popen([sys.executable, "-m", "hpcrun", *WORDS], text=True, stdout=-1)
    run = tmp_path / "runs" / "s" / "002"
    jobs.wait_for(lambda: len(read_lines(run / "metrics.jsonl")) == 3)
    hpcrun.Sweep("runs/s")["002"].preempt()
    shown, _ = search.communicate(timeout=jobs.PATIENCE)
    assert search.returncode == 0, shown
    assert "6 trials: 3 complete, 2 fail, 1 pruned" in shown
    assert "best: s/004: loss=0.02187 kind=good lr=0.0656" in shown
    states = [trial.state.name for trial in trials(tmp_path)]
    assert states == ["COMPLETE", "PRUNED", "COMPLETE", "FAIL", "COMPLETE", "FAIL"]
    assert trials(tmp_path)[2].intermediate_values == {
        step: 0.1 * 0.9**2 / step for step in (1, 2, 3)
    }
    assert began(tmp_path) == [
        *("000 0", "001 0", "002 0", "002 1", "003 0", "004 0", "005 0"),
    ]
    sweep = hpcrun.Sweep("runs/s")
    assert [row["state"] for row in sweep.status()] == [
        *("finished", "pruned", "finished", "failed", "finished", "finished"),
    ]
    again = jobs.hpcrun(*WORDS, cwd=tmp_path)
    assert (again.returncode, len(began(tmp_path))) == (0, 7)
    axes = ("--sweep", "kind=good", "--sweep", "lr=1,2")
    more = jobs.hpcrun(*WORDS[:1], *axes, *WORDS[3:], cwd=tmp_path)
    assert "is a search; continue it as before, or choose another --name" in more.stderr


@pytest.mark.slow
def test_the_same_command_continues_a_cancelled_trial(tmp_path: Path) -> None:
    # Optuna may choose the same values twice.
    prepare(tmp_path, ["good", "good", "good"], factor=1.0)
    (tmp_path / "hold").touch()
    words = [sys.executable, "-m", "hpcrun", *WORDS[:3], "--max-parallel", "2", *WORDS[3:]]
    search = subprocess.Popen(words, cwd=tmp_path, text=True, stdout=-1)
    jobs.wait_for((tmp_path / "began").exists)
    jobs.wait_for(lambda: len(began(tmp_path)) == 2)
    second = jobs.hpcrun(*WORDS, cwd=tmp_path)
    assert second.returncode == 2
    assert "runs this search; watch it with `hpcrun status s`" in second.stderr
    sweep = hpcrun.Sweep(tmp_path / "runs" / "s")
    sweep["000"].cancel()
    (tmp_path / "hold").unlink()
    shown, _ = search.communicate(timeout=jobs.PATIENCE)
    # No other trial begins in the place of a run that a person cancels.
    assert (search.returncode, began(tmp_path)) == (1, ["000 0", "001 0"])
    assert "s: 3 trials: 1 complete, 1 running, 1 waiting" in shown
    assert "the same command continues s/000" in shown
    # A full disk leaves a part of a line.
    with (tmp_path / "runs" / "s" / JOURNAL).open("ab") as journal:
        journal.write(b'{"op_code": 5, "worker')
    done = jobs.hpcrun(*WORDS[:1], "--json", *WORDS[1:], cwd=tmp_path)
    found = json.loads(done.stdout)
    assert (found["counts"], found["best"], found["left"]) == ({"complete": 3}, "s/000", [])
    assert len(sweep) == 3
    assert began(tmp_path) == ["000 0", "000 0", "001 0", "002 0"]


def test_values_that_the_config_refuses_fail_their_trial_only(tmp_path: Path) -> None:
    import optuna

    prepare(tmp_path, [])
    text = SEARCH.format(trials=2) + "    job.time: [1:00:00, 0:00:01]\n"
    (tmp_path / "search.yaml").write_text(text)
    study = optuna.load_study(study_name="s", storage=storage(tmp_path))
    for limit in ("0:00:01", "1:00:00"):
        study.enqueue_trial({"kind": "good", "lr": 0.1, "job.time": limit})
    done = jobs.hpcrun(*WORDS, cwd=tmp_path)
    assert "trial 0 is refused: search.yaml:7: job.time: the limit" in done.stdout, done.stderr
    assert (done.returncode, began(tmp_path)) == (0, ["001 0"])
    again = jobs.hpcrun(*WORDS[:1], "--max-parallel", "0", *WORDS[1:], cwd=tmp_path)
    assert "--max-parallel: should be a whole number" in again.stderr
    again = jobs.hpcrun(*WORDS[:1], "--dry-run", *WORDS[1:], cwd=tmp_path)
    assert "001  good  0.1  1:00:00   finished" in again.stdout
    assert [trial.state.name for trial in trials(tmp_path)] == ["FAIL", "COMPLETE"]


def test_a_wrong_metric_is_corrected_without_a_second_run(tmp_path: Path) -> None:
    prepare(tmp_path, ["good"])
    plain = (tmp_path / "search.yaml").read_text()
    (tmp_path / "search.yaml").write_text(plain.replace("metric: loss", "metric: los"))
    refused = jobs.hpcrun(*WORDS, cwd=tmp_path)
    assert refused.returncode == 2
    assert "metrics.jsonl: has no los; correct search.metric" in refused.stderr
    (tmp_path / "search.yaml").write_text(plain)
    done = jobs.hpcrun(*WORDS, cwd=tmp_path)
    assert (done.returncode, began(tmp_path)) == (0, ["000 0"])
    for old, new, words in (
        ("minimize", "maximize", "has minimize loss; choose another"),
        ("kind: [good", "kind: [other, good", "or another --name"),
        ("lr: {", "wd: {", "is a search with other keys or values (lr)"),
    ):
        text = plain.replace("  trials", "  direction: minimize\n  trials").replace(old, new)
        (tmp_path / "search.yaml").write_text(text.replace("trials: 1", "trials: 2"))
        changed = [word.replace("{lr}", "{wd}") if "wd" in new else word for word in WORDS]
        refused = jobs.hpcrun(*changed, cwd=tmp_path)
        assert (refused.returncode, words in refused.stderr) == (2, True), refused.stderr
    assert began(tmp_path) == ["000 0"]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("  trials: 3\n", "", "search.trials: is missing"),
        ("trials: 3", "trials: 0", "search.yaml:3: search.trials: should be more than 0"),
        ("trials: 3", "trials: 3\n  metrics: a", "did you mean search.metric?"),
        ("sampler: RandomSampler", "sampler: Tpe", "search.sampler: should be one of CmaEs"),
        ("n_warmup_steps", "warmup", "search.pruner: ThresholdPruner.__init__() got an unexpected"),
        ("high: 1.0", "high: 1e-4", "search.yaml:9: search.space.lr: `low"),
        (
            "float: {",
            "floats: {",
            "search.space.lr: should be one of float, int, choices",
        ),
        (
            "    kind",
            "    train.lr: {float: {low: 1, high: 2}}\n    kind",
            "has no effect: the command does not",
        ),
        ("search:", "grid: {seed: [1]}\nsearch:", "grid: has no effect with search"),
    ],
)
def test_a_wrong_search_is_one_line_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, old: str, new: str, words: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    text = SEARCH.format(trials=3)
    assert old in text
    (tmp_path / "search.yaml").write_text(text.replace(old, new))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(hpcrun.UserError) as refused:
        hpcrun.submit(
            sweep_file="search.yaml", name="s", executor="local", cpu=True,
            command=["python", "script.py", "{kind}", "{lr}"],
        )  # fmt: skip
    assert words in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (tmp_path / "runs").exists()


def test_another_program_adds_runs_waits_and_prunes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    monkeypatch.chdir(tmp_path)
    sweep = hpcrun.submit(
        command=[sys.executable, "script.py", "{kind}", "{lr}"],
        sweep={"kind": ["good"], "lr": [0.5]},
        name="s", executor="local", cpu=True, nodes=1, gpus=1, snapshot=False,
    )  # fmt: skip
    bad = sweep.add({"kind": "bad", "lr": 0.25})
    good, _ = sweep
    assert (good.name, bad.name, sweep.values["001"]) == (
        "s/000",
        "s/001",
        {"kind": "bad", "lr": 0.25},
    )
    assert hpcrun.wait_any([bad, good], timeout=jobs.PATIENCE) == [good]
    jobs.wait_for(lambda: len(bad.metrics()) == 3)
    assert [line["step"] for line in bad.metrics(since=1)] == [2, 3]
    with pytest.raises(TimeoutError, match="1 runs have not ended after 0 s"):
        hpcrun.wait_any([bad], timeout=0)
    bad.cancel(prune=True)
    assert bad.wait(timeout=jobs.PATIENCE) == "pruned"
    assert bad.result()["reason"] == "a search ended it early; `hpcrun resume` continues it"
    # The same values again: a pruned run stays as it is.
    assert sweep.add({"kind": "bad", "lr": 0.25}).status()["state"] == "pruned"
    assert hpcrun.wait_any([]) == []
    with pytest.raises(hpcrun.UserError, match="is not a key of the sweep"):
        sweep.add({"lr": 0.1})
