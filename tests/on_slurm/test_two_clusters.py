"""Two clusters of one site in one slurmdbd: a run on one cluster is shown and canceled from the other."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from hpcrun import slurm as programs
from hpcrun.run.directory import RunDirectory
from tests import jobs

from .cluster import PATIENCE, SlurmCluster
from .separate_cluster import running
from .training import Bench

pytestmark = [pytest.mark.slurm, pytest.mark.slow]

NODE = "node2"


class Far:
    """The second cluster: its controller and its only node are one host of the first cluster's network."""

    def __init__(self, near: SlurmCluster) -> None:
        from devclusterlib import daemons, slurmconf

        self.near = near
        layout, spec = near.handle.layout, near.handle.spec
        self.name = f"{near.name}-far"
        near.orphan_node(NODE)
        own = (
            ("SlurmctldHost", f"{NODE}({layout.address(NODE)})"),
            ("StateSaveLocation", f"{layout.root}/far/state"),
            ("SlurmdSpoolDir", f"{layout.root}/far/spool"),
            ("SlurmctldPidFile", f"{layout.root}/far/slurmctld.pid"),
            ("SlurmctldLogFile", f"{layout.root}/far/slurmctld.log"),
        )
        text = slurmconf.slurm_conf(replace(spec, name=self.name, settings=own), layout)
        conf = layout.etc / "far.conf"
        conf.write_text(without_node(text, "node1"))
        layout.slurm_conf.write_text(without_node(layout.slurm_conf.read_text(), NODE))
        near.stop_daemon("slurmctld")
        near.start_daemon("slurmctld")
        near.admin("sacctmgr", "--immediate", "add", "cluster", self.name)
        # As at a site: each host has its own file at the same path.
        self._as_root("mkdir", "-p", f"{layout.root}/far/state", f"{layout.root}/far/spool")
        self._as_root("mount", "--bind", str(conf), str(layout.slurm_conf))
        self._daemons = [
            near.popen(
                ["sh", "-c", f'exec "$0" "$@" >{layout.root}/far/{command[0]}.out 2>&1', *command],
                host=NODE,
                user="root",
                cwd="/",
            )
            for command in (
                ["slurmctld", "-D", "-f", str(layout.slurm_conf)],
                daemons.slurmd_argv(layout, spec.slurm, NODE),
            )
        ]
        near.wait_until(lambda: "idle" in self._says("sinfo", "--noheader", "--format=%T"))

    def _as_root(self, *command: str) -> None:
        self.near.run(command, host=NODE, user="root")

    def _says(self, *command: str) -> str:
        """Return a program's output on the login host of the first cluster, for this cluster's name."""
        program, *options = command
        asked = [program, f"--clusters={self.name}", *options]
        return self.near.run(asked, check=False).stdout

    def state(self, job: str) -> str | None:
        """Return the state of a job on this cluster."""
        text = self._says("scontrol", "show", "job", job)
        return programs.parse_show_job(text).get("JobState")

    def stop(self) -> None:
        """Stop the daemons."""
        for daemon in self._daemons:
            daemon.terminate()
            daemon.communicate()


def without_node(conf: str, node: str) -> str:
    """Return a slurm.conf without the line of a node."""
    lines = conf.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(f"NodeName={node} "))


@pytest.fixture
def far() -> Iterator[Far]:
    for near in running("near", nodes=2, accounting=True):
        cluster = Far(near)
        yield cluster
        cluster.stop()


def shown(bench: Bench, name: str) -> str:
    """Return the state in the output of `hpcrun status`."""
    return str(json.loads(bench.hpcrun("status", "--json", name).stdout)["state"])


def test_runs_with_one_job_id_on_two_clusters_are_distinguished(far: Far) -> None:
    bench = Bench(far.near)
    there: RunDirectory = bench.submit(
        "there", f"--cluster={far.name}", job__nodes=1, model__pause=0.5
    )
    here: RunDirectory = bench.submit("here", job__nodes=1, model__pause=3.0)
    job = bench.job(there)
    # Each cluster counts from 1.
    assert bench.job(here) == job
    bench.wait_for_step(here, 3)
    with bench.held_at(there, 3):
        assert (far.state(job), far.near.state(job)) == ("RUNNING", "RUNNING")
        assert (shown(bench, "there"), shown(bench, "here")) == ("running", "running")
        bench.hpcrun("cancel", "--no-wait", "there")
    bench.wait_until(
        lambda: far.state(job) == "CANCELLED", PATIENCE, lambda: f"job {job} is {far.state(job)}"
    )
    bench.wait_until(there.result.exists, PATIENCE, lambda: bench.story(there))
    assert far.near.state(job) == "RUNNING"
    assert (shown(bench, "there"), shown(bench, "here")) == ("cancelled", "running")
    bench.hpcrun("resume", "there", "--detach")
    second = bench.job(there)
    assert second != job
    # The batch step records the end after the result of the ranks.
    bench.wait_until(
        lambda: bench.causes(there) == ["cancelled", "finished"],
        PATIENCE,
        lambda: bench.story(there),
    )
    assert bench.result(there)["state"] == "finished"
    assert jobs.events(there, "submitted")[-1].fields["cluster"] == far.name
    bench.hpcrun("cancel", "here")
    assert bench.wait_for_end(here) == "CANCELLED", bench.story(here)
