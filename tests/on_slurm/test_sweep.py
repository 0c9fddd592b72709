"""A sweep on the real Slurm: one array, each element with its own end, budget and requeue."""

from __future__ import annotations

import itertools
import json
import re
from collections import Counter

import pytest

from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_lines
from tests.results.report.page import Page
from tests.support import jobs

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = pytest.mark.slurm

# What an element does is in a file that has its values as its name; without one it finishes.
ELEMENT = """\
echo "element $*"
kind=$(cat "kind-$1-$2-$3" 2>/dev/null)
[ "$kind" = crash ] && { echo no luck >&2; exit 3; }
[ "$kind" = preempted ] && [ "$HPCRUN_RESTART" != 0 ] && kind=
[ -z "$kind" ] && exit 0
trap 'exit 143' TERM USR1 USR2
echo waits
while :; do sleep 0.1; done
"""
SHAPE = ("--nodes", "1", "--gpus", "1", "--cpu", "--executor", "slurm", "--no-snapshot")
NOTIFY = 'watch.notify=cat >> "$HPCRUN_RUN/messages.jsonl"'


@pytest.fixture
def bench(slurm: SlurmCluster) -> Bench:
    place = Bench(slurm)
    place.write("element.sh", ELEMENT)
    return place


def line(name: str, axes: dict[str, list[str]], *more: str) -> list[str]:
    """The command line of a sweep of the script."""
    options = [f"--sweep={key}={','.join(values)}" for key, values in axes.items()]
    words = ["sh", "element.sh", "{lr}", "{wd}", "{seed}"]
    settings = ("restarts.crash=1", NOTIFY)
    return ["submit", "--name", name, *SHAPE, *settings, *options, *more, "--", *words]


def run_of(bench: Bench, name: str, number: int) -> RunDirectory:
    return RunDirectory(bench.folder / "runs" / name / f"{number:03d}")


def waits(run: RunDirectory) -> bool:
    logs = run.logs.glob("*/restart-0/rank-00000.log")
    return any("waits" in path.read_text() for path in logs)


def wait_until_it_waits(bench: Bench, run: RunDirectory) -> None:
    bench.slurm.wait_until(lambda: waits(run), ENDED, lambda: bench.told(run))


def sweep_with_four_ends(bench: Bench, name: str, axes: dict[str, list[str]]) -> None:
    """Preempt the last element and the one before, crash one, cancel one; all others finish."""
    values = list(itertools.product(*axes.values()))
    count = len(values)
    kinds = dict.fromkeys(range(count), "")
    kinds |= {count - 1: "preempted", count - 2: "preempted", 0: "crash", 1: "cancelled"}
    for number, kind in kinds.items():
        if kind:
            bench.write(f"kind-{'-'.join(values[number])}", kind)
    bench.hpcrun(*line(name, axes))
    runs = {number: run_of(bench, name, number) for number in kinds}
    for number, kind in kinds.items():
        if kind not in ("preempted", "cancelled"):
            continue
        wait_until_it_waits(bench, runs[number])
        bench.hpcrun("preempt" if kind == "preempted" else "cancel", f"{name}/{number:03d}")

    def over() -> bool:
        return all(run.result.exists() for run in runs.values())

    bench.slurm.wait_until(over, ENDED, lambda: "\n".join(map(bench.told, runs.values())))
    found = {number: jobs.result(run).get("state") for number, run in runs.items()}
    expected = {
        "": "finished",
        "preempted": "finished",
        "crash": "failed",
        "cancelled": "cancelled",
    }
    assert found == {number: expected[kind] for number, kind in kinds.items()}
    causes = [event.cause for event in jobs.events(runs[count - 1], "ended")]
    assert causes == ["preemption", "finished"]
    assert [event.cause for event in jobs.events(runs[0], "ended")] == ["crash", "crash"]
    told = bench.hpcrun("aggregate", f"runs/{name}")
    assert f"{count} runs (1 cancelled, 1 failed, {count - 2} finished)" in told
    states = dict.fromkeys(range(count), "finished") | {0: "failed", 1: "cancelled"}
    preempted = {count - 1, count - 2}
    # The result is there before Slurm has ended the job.
    bench.slurm.wait_until(
        lambda: told_by_status(bench, name) == (states, preempted),
        ENDED,
        lambda: str(told_by_status(bench, name)),
    )
    assert told_by_report(bench, name) == (states, len(preempted))
    # A single array: its tasks have the numbers of the elements.
    given = {number: jobs.events(run, "submitted") for number, run in runs.items()}
    ids = {number: one[0].attempt.job for number, one in given.items() if one[0].attempt}
    array = ids[0].partition("_")[0]
    assert ids == {number: f"{array}_{number}" for number in kinds}


def told_by_status(bench: Bench, name: str) -> tuple[dict[int, str], set[int]]:
    """Return the state of each element, and the preempted elements, as `hpcrun status` prints them."""
    lines = bench.hpcrun("status", name, "--json").splitlines()
    rows = [json.loads(line) for line in lines if line.startswith("{")]
    numbers = [int(row["name"].rpartition("/")[2]) for row in rows]
    states = {number: row["state"] for number, row in zip(numbers, rows, strict=True)}
    pairs = zip(numbers, rows, strict=True)
    return states, {number for number, row in pairs if "preemption" in row["restarts"]}


def told_by_report(bench: Bench, name: str) -> tuple[dict[int, str], int]:
    """Return the states of the elements, and the number of preemptions, as `hpcrun report` shows them."""
    bench.hpcrun("report", f"runs/{name}", "-o", f"{name}.html")
    page = Page(bench.folder / f"{name}.html")
    states = {int(run["name"].rpartition("/")[2]): run["state"] for run in page.data["runs"]}
    for state, count in Counter(states.values()).items():
        assert f"<dt>{state}</dt><dd>{count}</dd>" in page.source
    preempted = re.search(r'<th scope="row">preemption</th><td class="n">(\d+)<', page.source)
    return states, int(preempted[1]) if preempted else 0


def test_each_element_of_a_sweep_has_its_own_end(bench: Bench) -> None:
    sweep_with_four_ends(
        bench, "small", {"lr": ["1e-4", "3e-4"], "wd": ["0"], "seed": ["0", "1", "2"]}
    )
    messages = bench.folder / "runs" / "small" / "messages.jsonl"
    jobs.wait_for(messages.exists)
    (message,) = read_lines(messages)
    assert message["text"] == "small: failed: 6 runs: 4 finished, 1 failed, 1 cancelled"
    told = bench.hpcrun("logs", "small/005")
    assert "element 3e-4 0 2" in told
    # The same line again submits the two that did not finish, and a further value gets a new number.
    (bench.folder / "kind-1e-4-0-0").unlink()
    (bench.folder / "kind-1e-4-0-1").unlink()
    grown = {"lr": ["1e-4", "3e-4", "5e-4"], "wd": ["0"], "seed": ["0", "1", "2"]}
    told = bench.hpcrun(*line("small", grown, "--dry-run", "--json"))
    shown = json.loads(told[told.index("{") :])
    actions = [one["action"] for one in shown["runs"]]
    assert actions == ["again", "again", *["finished"] * 4, *["new"] * 3]
    told = bench.hpcrun(*line("small", grown, "--dry-run", "--only-new"))
    assert "9 runs: 3 to submit, 4 finished, 2 left as before" in told
    bench.hpcrun(*line("small", grown, "--max-parallel", "2"))
    runs = [run_of(bench, "small", number) for number in range(9)]
    bench.slurm.wait_until(
        lambda: all(jobs.result(run).get("state") == "finished" for run in runs),
        ENDED,
        lambda: "\n".join(map(bench.told, runs)),
    )
    assert [len(jobs.events(run, "submitted")) for run in runs] == [2, 2, *[1] * 7]
    jobs.wait_for(lambda: len(read_lines(messages)) == 2)
    assert read_lines(messages)[1]["text"] == "small: finished: 9 runs: 9 finished"
    # A job ends after its run.
    bench.slurm.wait_until(
        lambda: "nothing to submit; 9 runs: 9 finished" in bench.hpcrun(*line("small", grown)),
        ENDED,
        lambda: bench.hpcrun("status", "small"),
    )


@pytest.mark.slow
def test_24_runs_of_a_sweep_end_separately(bench: Bench) -> None:
    axes = {"lr": ["1e-4", "3e-4", "1e-3", "3e-3"], "wd": ["0", "0.1"], "seed": ["0", "1", "2"]}
    sweep_with_four_ends(bench, "grid", axes)


def test_a_refused_sweep_leaves_nothing(bench: Bench) -> None:
    axes = {"lr": ["1"], "wd": ["0"], "seed": ["0", "1"]}
    told = bench.hpcrun(*line("nowhere", axes, "--partition", "nope"), check=False)
    first, second = told.splitlines()
    assert "Slurm lists no partition nope; there are: batch, urgent" in first
    assert second.startswith("hpcrun: sbatch refused: ")
    assert "nvalid partition" in second
    assert not (bench.folder / "runs" / "nowhere").exists()
