"""From a laptop with a fresh home, a wheel and an ssh address: a run on a real Slurm."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator

import pytest

from hpcrun.run.directory import RunDirectory
from tests.support import jobs, sshd
from tests.support.wheels import installed_wheel

from .cluster import PATIENCE, SlurmCluster, hosts
from .conftest import unavailable

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]


def entry(slurm: SlurmCluster, host: str) -> list[str]:
    """Return the command that enters a host of the cluster."""
    holder = str(hosts.holder_of(slurm.handle.layout, host))
    return ["nsenter", "--target", holder, "--net", "--mount", "--uts", "--"]


@pytest.fixture
def site(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[sshd.Site]:
    """The login host of the cluster with an sshd, and another host as the laptop."""
    if (reason := sshd.why_not()) is not None:
        unavailable(reason)
    folder = slurm.shared / "wheel"
    folder.mkdir()
    shown = slurm.run(["bash", "-c", 'echo "$SLURM_CONF"; echo "$PATH"']).stdout.splitlines()
    running = sshd.Site(
        slurm.user,
        login=entry(slurm, "login"),
        laptop=entry(slurm, "node4"),
        address=slurm.handle.layout.address("login"),
        variables={"SLURM_CONF": shown[0], "PATH": shown[1]},
        package=installed_wheel(folder),
    )
    yield running
    slurm.cancel_all()
    running.close()


def test_a_laptop_follows_cancels_and_resumes_a_run(
    site: sshd.Site, slurm: SlurmCluster, calm: RunDirectory
) -> None:
    project = site.here / "project"
    project.mkdir()
    (project / "probe.py").write_text(jobs.PROBE)
    (project / "empty.yaml").write_text("{}\n")
    for path in (project, *project.iterdir()):
        os.chown(path, site.user.pw_uid, site.user.pw_gid)
    assert site.run("git", "init", "-q", ".", cwd=project).returncode == 0
    there = site.there / "hpcrun" / "project"
    run = RunDirectory(there / "runs" / "far")
    settings = jobs.probe_config(
        there,
        **{"job.executor": "slurm", "job.gpus": 1, "job.mem": "1G", "checkpoint.every": 10},
        model__pause=0.03,
    )
    said = site.hpcrun("submit", "-c", "empty.yaml", "--name", "far", *settings, cwd=project)
    assert "hpcrun: far is job " in said.stdout
    follower = subprocess.Popen(
        site.command(*site.words("logs", "-f", "far"), cwd=project),
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    with jobs.held_at(run, 12):
        site.stop()
        shown, words = follower.communicate(timeout=PATIENCE)
        assert follower.returncode == 255
        assert "the runs there continue" in words
        assert "hpcrun: far: starting at step 0" in shown
        site.start()
        assert "running" in site.hpcrun("status", "far", cwd=project).stdout
        ended = site.hpcrun("cancel", "far", cwd=project)
    assert "far is cancelled at step" in ended.stdout
    end = site.hpcrun("resume", "far", "--follow", cwd=project)
    assert "hpcrun: far is finished" in end.stdout
    assert [event.cause for event in jobs.events(run, "ended")] == ["cancelled", "finished"]
    assert jobs.final_state(run) == jobs.final_state(calm)
    assert not [path for path in site.here.rglob("*") if path.name in ("runs", "far")]
