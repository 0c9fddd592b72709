"""tools/gpu_acceptance.py: its page, exit codes, isolated checks, and planted faults."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

ROOT = Path(__file__).parents[2]
TOOLS = ROOT / "tools"
for folder in (TOOLS / "bench", TOOLS):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

import gpu_acceptance  # noqa: E402
from acceptancelib import (  # noqa: E402
    bench,
    collectives,
    compiled,
    deferred,
    failure,
    memory,
    precision,
    resume,
    sharded,
    staging,
)
from acceptancelib.outcome import CHECKS, Job, Outcome  # noqa: E402

from hpcrun.run.directory import RunDirectory  # noqa: E402
from hpcrun.train.parallel.strategies import Strategy  # noqa: E402
from hpcrun.train.step.gate import StepGate  # noqa: E402


def start(arguments: list[str]) -> "subprocess.CompletedProcess[str]":
    """Run the program in a new process."""
    return subprocess.run(
        [sys.executable, TOOLS / "gpu_acceptance.py", *arguments],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def run(arguments: list[str], monkeypatch: pytest.MonkeyPatch, answers: dict[str, Outcome]) -> int:
    """Run the program's main with ``answers`` instead of the processes of the checks."""
    monkeypatch.setattr(sys, "argv", ["gpu_acceptance.py", *arguments])
    monkeypatch.setattr(gpu_acceptance, "run_check", lambda job, *_, **__: [answers[job.check]])
    monkeypatch.setattr(gpu_acceptance.signal, "signal", lambda *_: None)
    return gpu_acceptance.main()


def test_a_short_simulation_prints_a_page_and_writes_json(tmp_path: Path) -> None:
    result = tmp_path / "mail.json"
    done = start(["--simulate", "--only", "environment", "--json", str(result)])
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith("hpcrun GPU acceptance: simulated on CPUs with gloo\n")
    assert re.search(r"^environment +devices +not run\n    needs a GPU$", done.stdout, re.MULTILINE)
    assert re.search(
        rf"^environment +libraries +pass\n    torch {re.escape(torch.__version__)}",
        done.stdout,
        re.M,
    )
    told = json.loads(result.read_text())
    assert (told["gpus"], told["simulated"]) == (0, True)
    assert told["counts"] == {"not run": 1, "pass": 3}
    assert told["outcomes"][2]["details"]["torch"] == torch.__version__


@pytest.mark.slow
def test_the_whole_simulation_finds_no_fault(tmp_path: Path) -> None:
    result = tmp_path / "mail.json"
    done = start(["--simulate", "--json", str(result)])
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(result.read_text())
    assert list(told["seconds"]) == list(CHECKS)
    passed = {it["item"] for it in told["outcomes"] if it["result"] == "pass"}
    assert passed >= {
        "fp16", "all-reduce", "reduce-scatter", "snapshot", "fsdp", "deferred build",
        "estimate", "failed rank", "equal bits", "speed",
    }  # fmt: skip


def test_without_a_gpu_there_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gpu_acceptance, "visible", lambda _: (0, "0 x "))
    assert run([], monkeypatch, {}) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err == (
        "gpu_acceptance: torch sees no GPU here; run this on a node with GPUs, or try the path with "
        "--simulate\n"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "wrong",
    [["--only", "bench,all"], ["--minutes", "0"], ["--minutes", "ten"], ["--json", "/nowhere/a"]],
)
def test_bad_input_is_refused_before_any_check(
    wrong: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        run(wrong, monkeypatch, {})
    assert ended.value.code == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith(f"gpu_acceptance.py: error: argument {wrong[0]}: "), last


def test_a_failed_check_ends_no_other_check(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    answers = {
        "staging": Outcome(
            "snapshot",
            *("fail", "the snapshot differs", "open an issue"),
            {"losses": [1.5, math.nan], "places": {"cpu": math.inf}},
        ),
        "bench": Outcome("speed", "pass", "1,000 tokens/s"),
    }
    wanted = ["--simulate", "--only", "staging,bench", "--json", str(tmp_path / "a.json")]
    assert run(wanted, monkeypatch, answers) == 1
    page = capsys.readouterr().out
    assert re.search(r"snapshot +FAIL\n    the snapshot differs\n    -> open an issue\n", page)
    assert "\n1 pass, 1 fail, in " in page

    def refuse(constant: str) -> None:
        raise ValueError(f"{constant} is no JSON")

    told = json.loads((tmp_path / "a.json").read_text(), parse_constant=refuse)
    assert told["outcomes"][0]["details"] == {"losses": [1.5, "nan"], "places": {"cpu": "inf"}}
    answers["staging"] = Outcome("snapshot", "warn", "slow")
    assert run(wanted, monkeypatch, answers) == 0


def test_checks_after_the_last_minute_are_not_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    wanted = ["--simulate", "--minutes", "0.001", "--only", "fsdp", "--json", str(tmp_path / "a")]
    assert run(wanted, monkeypatch, {}) == 0
    assert (
        "the 0.001 minutes are over\n    -> --only fsdp, or more --minutes"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("program", "seconds", "cut", "result", "line"),
    [
        (
            "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
            60,
            False,
            "fail",
            "ended with SIGSEGV",
        ),
        ("import sys; sys.exit(3)", 60, False, "fail", "ended with exit code 3"),
        ("import time; time.sleep(600)", 1, False, "fail", "not done after 1 s"),
        ("import time; time.sleep(600)", 1, True, "unknown", "not done after 1 s"),
    ],
)
def test_a_crash_or_hang_of_a_check_is_recorded(
    program: str, seconds: float, cut: bool, result: str, line: str,
    tmp_path: Path,
) -> None:  # fmt: skip
    (tmp_path / "__main__.py").write_text(program)
    job = Job("fsdp", 2, str(tmp_path), seconds)
    [outcome] = gpu_acceptance.run_check(job, dict(os.environ), cut=cut, program=tmp_path)
    assert (outcome.result, outcome.line.endswith(line)) == (result, True), outcome


def test_precision_finds_a_gate_that_passes_an_inf(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(StepGate, "late_on", StepGate.late_on)  # restored after the check
    job = Job("precision", 0, str(tmp_path), 60)
    assert [(it.name, it.result) for it in precision.check(job)] == [
        (name, "pass") for name in ("fp32", "tf32", "bf16", "fp16")
    ]
    monkeypatch.setattr(Strategy, "clip", lambda *_: torch.zeros(()))
    found = precision.measure("fp32", torch.device("cpu"), 1)
    assert "a step with a planted inf was not skipped" in precision.faults(
        found, found["losses"][0], 1e-4
    )
    assert found["inf_changed"]


@pytest.mark.slow
def test_the_speed_is_that_of_a_users_run(tmp_path: Path) -> None:
    job = Job("bench", 0, str(tmp_path), 300)
    [outcome] = bench.check(job)
    assert outcome.result == "pass", outcome
    assert re.search(
        r"^llama-1b.yaml, 2 ranks, micro-batches of 2: [\d,]+ tokens/s, MFU [\d.]+%, [\d.]+ GB; "
        r"train.deterministic=true: [\d,]+ tokens/s, MFU [\d.]+%, a step [\d.]+ x as long$",
        outcome.line,
    )
    for value in ("false", "true"):
        run = RunDirectory(tmp_path / "runs" / f"deterministic-{value}-2")
        config = yaml.safe_load(run.config.read_text())
        assert config["train"]["deterministic"] is (value == "true")
        assert config["train"]["parallel"] == "fsdp"
        # The check ends a run without its last checkpoint.
        assert not list(run.checkpoints.glob("step-*"))


def test_a_run_out_of_memory_gets_half_the_micro_batch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    tried: list[tuple[str, int]] = []

    def measure(job: Job, value: str, size: int, late: float) -> dict[str, Any]:
        tried.append((value, size))
        figures = {"tokens_per_second": 5e4, "step_time": 1.0, "mfu": 0.4, "memory_gb": 70.0}
        return {"failed": "out of memory"} if size > 2 else figures

    monkeypatch.setattr(bench, "measure", measure)
    [outcome] = bench.check(Job("bench", 8, str(tmp_path), 60))
    assert tried == [("false", 8), ("false", 4), ("false", 2), ("true", 2)]
    assert outcome.result == "pass"

    figures = measure(Job("bench", 8, "", 60), "true", 2, 0.0)
    slow = bench.judge({**figures, "mfu": 0.1}, figures, 2, Job("bench", 8, "", 60))
    assert (slow.result, slow.line.endswith("usual is an MFU above 0.2")) == ("warn", True)
    ended = bench.judge({"failed": "rank 1: lost"}, {}, 2, Job("bench", 8, "", 60))
    assert (ended.result, ended.line) == ("fail", "train.deterministic=false: rank 1: lost")


def test_each_comparison_finds_a_planted_difference() -> None:
    def sums(bits: str, furthest: float = 0.0) -> dict[str, Any]:
        hashes = {"fp32": bits, "bf16": "b"}
        return {"all-reduce": hashes, "furthest": {"all-reduce": furthest}}

    first = [sums("a"), sums("a")]
    assert collectives.compare("all-reduce", first, first).result == "pass"
    assert collectives.compare("all-reduce", first, [sums("c"), sums("c")]).line == (
        "two equal starts have different bits in fp32"
    )
    for other in (sums("c"), sums("a", 0.5), sums("a", math.nan)):
        assert collectives.compare("all-reduce", [sums("a"), other], first).result == "fail"

    ends = {
        "calm": {"causes": ["finished"], "state": {"w": "1"}},
        "interrupted": {"causes": ["preemption", "crash", "finished"], "state": {"w": "1"}},
    }
    assert resume.judge(ends, 2).result == "pass"
    # A model has thousands of values; the file is for mail.
    assert resume.judge(ends, 2).details == {"values": 1}
    for change in ({"state": {"w": "2"}}, {"state": {}}, {"causes": ["finished"]}):
        other_ends = {**ends, "interrupted": {**ends["interrupted"], **change}}
        assert resume.judge(other_ends, 2).result == "fail"

    assert [failure.judge(seconds).result for seconds in ([0.1, 4.0], [0.1, 25.0], [0.1, None])] == [
        "pass", "fail", "fail",
    ]  # fmt: skip

    shard = {
        "losses": [1.0], "misplaced": "", "save_error": "", "resumed": "a", "undisturbed": "a", "shard": 0.5,
    }  # fmt: skip
    assert sharded.judge([shard, shard]).result == "pass"
    for change in (
        {"losses": [math.inf]},
        {"misplaced": "cpu"},
        {"save_error": "full"},
        {"resumed": "b"},
    ):
        assert sharded.judge([shard, {**shard, **change}]).result == "fail"

    normal = {"deferred": 0, "built": "a", "losses": [2.0, 1.0], "trained": "b"}
    late = {**normal, "deferred": 14}
    assert deferred.judge([{"normal": normal, "deferred": late}]).result == "pass"
    for change in ({"built": "c"}, {"losses": [2.0, 1.5]}, {"trained": "c"}, {"deferred": 0}):
        found = {"normal": normal, "deferred": {**late, **change}}
        assert deferred.judge([found]).result == "fail"

    assert memory.judge(100, [80, 114], "fsdp").result == "pass"
    assert memory.judge(100, [80, 116], "fsdp").result == "warn"
    assert memory.judge(100, [84], "single").result == "warn"
    assert memory.judge(100, [0], "single").result == "fail"

    copied = {"bytes": 1e9, "seconds": 0.1, "plain_seconds": 0.1, "equal": True}
    assert staging.snapshot(copied).result == "pass"
    assert staging.snapshot({**copied, "seconds": 0.2}).result == "warn"
    assert staging.snapshot({**copied, "equal": False}).result == "fail"

    assert compiled.compare("compile", "default", 2, [5.0], [5.0001]).result == "pass"
    assert compiled.compare("compile", "default", 2, [5.0], [math.nan]).result == "fail"
