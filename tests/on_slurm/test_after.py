"""``--after RUN`` on the real Slurm."""

from __future__ import annotations

import pytest

from tests import jobs

from .cluster import SlurmCluster
from .scripts import ENDED, Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]


def test_a_job_waits_for_a_requeued_job_and_its_success(
    slurm: SlurmCluster,
) -> None:
    bench = Bench(slurm)

    def submit(name: str, script: str, *options: str) -> str:
        shape = ("--cpu", "--executor", "slurm", "--detach", "--no-snapshot", "--name", name)
        bench.hpcrun("submit", *shape, *options, "--", "sh", "-c", script)
        return str(bench.status(name)["job"])

    waits = "until [ -e go ]; do sleep 0.1; done"
    first = submit("first", waits)
    second = submit("second", "true", "--after", "first")
    failing = submit("failing", f"{waits}; exit 3", "restarts.crash=0")
    hopeless = submit("hopeless", "true", "--after", "failing")
    log = bench.folder / "runs" / "first" / "events.jsonl"
    slurm.wait_until(lambda: "opened" in log.read_text())
    bench.hpcrun("preempt", "first")
    slurm.wait_restarts(first, 1)
    told = bench.status("second")
    assert (told["state"], told["detail"]) == ("pending", "waiting: for another job to end first")
    bench.write("go", "")
    bench.wait_for_end(first)
    bench.wait_for_end(second)
    bench.wait_for_end(failing, "FAILED")
    slurm.wait_until(lambda: slurm.state(hopeless) == "CANCELLED", ENDED)
    assert bench.status("hopeless")["state"] == "cancelled"
    causes = [event.cause for event in jobs.events(bench.run("first"), "ended")]
    assert causes == ["preemption", "finished"]
