"""The requeued job excludes a node with a failed check, before any rank starts."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrun.run.attempt import Attempt
from hpcrun.run.files import read_json
from tests.support import jobs

from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

# With a file size limit of 0, the agent of this node can write no file, as on a damaged mount.
_AGENT = """#!/bin/bash
case "$*" in
*hpcrun.network.agent*)
    (set -o noclobber; echo "$SLURMD_NODENAME" > {bad}) 2> /dev/null
    [ "$SLURMD_NODENAME" != "$(cat {bad})" ] || exec bash -c 'ulimit -f 0; trap "" XFSZ; exec "$@"' x "$@" ;;
esac
exec "$@"
"""


def test_a_node_that_cannot_write_is_excluded(bench: Bench) -> None:
    wrapper, bad = bench.folder / "wrapper", bench.folder / "bad-node"
    wrapper.write_text(_AGENT.format(bad=bad))
    wrapper.chmod(0o755)
    changes = {
        "job.nodes": 2,
        "job.gpus": 1,
        "job.preflight": "true",
        "job.container": json.dumps([str(wrapper)]),
        "job.time": "5:00",
        "train.steps": 20,
    }
    run = bench.submit(
        "checked", **{key.replace(".", "__"): value for key, value in changes.items()}
    )
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    node = bad.read_text().strip()
    ended = jobs.events(run, "ended")
    assert [event.cause for event in ended] == ["node-failure", "finished"], bench.story(run)
    assert ended[0].host == node
    assert f"preflight on {node}: run directory: cannot write" in ended[0].reason
    assert [event.hosts for event in jobs.events(run, "excluded")] == [[node]]
    assert bench.slurm.scontrol_show_job(bench.job(run))["ExcNodeList"] == node
    first, second = (
        read_json(Path(run.attempt_logs(Attempt(bench.job(run), restart))) / "preflight.json") or {}
        for restart in (0, 1)
    )
    assert list(first["unfit"]) == [node]
    assert not list(run.attempt_logs(Attempt(bench.job(run), 0)).glob("rank-*.log"))
    assert second["fit"]
    assert node not in second["nodes"]
