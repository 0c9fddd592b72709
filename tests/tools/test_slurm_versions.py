"""Other versions of Slurm: their packages, a cluster's choice of a version, and each version for real."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..on_slurm import cluster as slurm_cluster
from ..on_slurm.conftest import unavailable

# The helper of the Slurm tests puts the tool's modules on the path.
from devclusterlib import (  # isort: skip
    aptroot,
    cli,
    installations,
    layout,
    requirements,
    slurminstall,
    wrappers,
)
from devclusterlib.errors import Refusal  # isort: skip
from devclusterlib.spec import ClusterSpec  # isort: skip

VERSIONS = ("24.11", "26.05")
PLACE = layout.Layout("lab", Path("/tmp/devcluster-lab"))

STANZAS = """\
# Signed-By: /nowhere.gpg
Types: deb-src
URIs: http://sources.example/debian
Suites: bookworm

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm

Types: deb
# a remark
URIs: http://mirror.example/debian http://second.example/debian
Suites: bookworm bookworm-updates
Components: main
Signed-By: /usr/share/keyrings/ours.gpg

Types: deb
URIs: http://security.example/debian-security
Suites: bookworm-security
"""
LINES = """\
# deb http://remark.example/debian bookworm main
deb-src http://sources.example/debian bookworm main
deb http://security.example/debian-security bookworm-security main
deb [arch=amd64 signed-by=/keys/a.gpg] http://mirror.example/debian bookworm main contrib
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty folder for installations."""
    monkeypatch.setattr(installations, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def test_the_mirror_is_the_one_of_the_machines_own_release():
    found = aptroot.find_mirror([STANZAS], "bookworm")
    assert found == aptroot.Mirror("http://mirror.example/debian", "/usr/share/keyrings/ours.gpg")
    found = aptroot.find_mirror([LINES], "bookworm")
    assert found == aptroot.Mirror("http://mirror.example/debian", "/keys/a.gpg")


def test_a_failed_download_has_a_separate_exit_code(cache, monkeypatch, capsys):
    monkeypatch.setattr(requirements, "running_as_root", lambda: True)
    monkeypatch.setattr(aptroot, "source_texts", list)
    assert cli.main(["install", "--slurm", "24.11"]) == 3
    assert capsys.readouterr().err.startswith("devcluster: the apt sources of this machine name")
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("wrong", ["24", "latest", "../x", "24.11.5"])
def test_an_invalid_version_is_refused(wrong, monkeypatch, capsys):
    monkeypatch.setattr(requirements, "running_as_root", lambda: True)
    assert cli.main(["install", "--slurm", wrong]) == 2
    assert "write it like 24.11" in capsys.readouterr().err
    with pytest.raises(Refusal, match="write it like"):
        ClusterSpec(slurm=wrong)


def test_a_missing_version_is_named_with_its_remedy(cache, monkeypatch):
    monkeypatch.setattr(requirements, "running_as_root", lambda: True)
    with pytest.raises(Refusal) as caught:
        requirements.require(ClusterSpec(slurm="24.11"))
    assert caught.value.remedy == "run `tools/devcluster install --slurm 24.11`"
    assert not cache.exists()


def test_concurrent_installs_build_once_and_an_interrupted_install_leaves_nothing(
    cache, monkeypatch
):
    built = []
    inside = threading.Event()
    go_on = threading.Event()

    def build(work: Path, version: str, _env: dict[str, str]) -> str:
        built.append(version)
        (work / "prefix").mkdir()
        inside.set()
        assert go_on.wait(60)
        return "slurm 24.11.0"

    monkeypatch.setattr(slurminstall, "build", build)
    (cache / ".making-killed").mkdir(parents=True)
    said: list[str] = []
    threads = [
        threading.Thread(target=lambda: said.append(slurminstall.install("24.11", {})))
        for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    assert inside.wait(60)
    assert not installations.installed("24.11")
    go_on.set()
    for thread in threads:
        thread.join()
    assert built == ["24.11"]
    assert sum("already" in line for line in said) == 1
    assert [path.name for path in cache.iterdir()] == ["slurm-24.11"]

    def interrupted(work: Path, *_: object) -> str:
        (work / "prefix").mkdir()
        raise KeyboardInterrupt

    monkeypatch.setattr(slurminstall, "build", interrupted)
    with pytest.raises(KeyboardInterrupt):
        slurminstall.install("26.05", {})
    assert [path.name for path in cache.iterdir()] == ["slurm-24.11"]


def test_no_program_of_a_package_may_become_root(tmp_path):
    program = tmp_path / "su"
    program.touch()
    program.chmod(0o4755)
    slurminstall.drop_privileges(tmp_path)
    assert program.stat().st_mode & 0o7777 == 0o755


def test_a_missing_version_is_excused_if_listed_as_unavailable(cache, monkeypatch):
    monkeypatch.setenv("HPCRUN_REQUIRE_SLURM", "1")
    monkeypatch.setenv("HPCRUN_SLURM_UNAVAILABLE", "24.11 26.05")
    with pytest.raises(pytest.skip.Exception):
        unavailable("why", "24.11")
    for version in ("", "25.05"):
        with pytest.raises(pytest.fail.Exception):
            unavailable("why", version)
    (cache / "slurm-24.11").mkdir(parents=True)
    with pytest.raises(pytest.fail.Exception):
        unavailable("why", "24.11")


def test_a_missing_feature_is_excused_if_listed_as_unavailable(monkeypatch):
    monkeypatch.setenv("HPCRUN_REQUIRE_SLURM", "1")
    monkeypatch.setenv("HPCRUN_SLURM_UNAVAILABLE", "26.05 gluster")
    with pytest.raises(pytest.skip.Exception):
        unavailable("why", features=["gluster"])
    for features in ([], ["accounting"]):
        with pytest.raises(pytest.fail.Exception):
            unavailable("why", features=features)


@pytest.fixture(params=VERSIONS)
def other(request: pytest.FixtureRequest) -> Iterator[slurm_cluster.SlurmCluster]:
    """Two nodes with another version of Slurm."""
    version: str = request.param
    if (reason := slurm_cluster.why_not(ClusterSpec(slurm=version))) is not None:
        unavailable(reason, version)
    name = f"version-{version.replace('.', '')}-{os.getpid()}"
    try:
        yield slurm_cluster.start(name, nodes=2, slurm=version)
    finally:
        slurm_cluster.stop(name)


@pytest.mark.slurm
def test_a_cluster_of_another_version_runs_and_requeues_jobs(other):
    version = other.handle.spec.slurm
    banners = other.run(["sh", "-c", "sbatch --version; srun --version"]).stdout
    assert [line.split()[-1][:5] for line in banners.splitlines()] == [version] * 2
    assert f"= {version}." in other.admin("scontrol", "show", "config").split("SLURM_VERSION")[1]
    said = other.run(["srun", "-N2", "--gpus-per-node=2", "sh", "-c", SHOW]).stdout
    assert sorted(said.split()) == ["node1:0,1", "node2:0,1"]
    job = other.sbatch("-N2", "--requeue", "--wrap", "srun sleep 300")
    other.wait_state(job, "RUNNING")
    other.run(["scontrol", "requeue", job])
    other.wait_restarts(job, 1)
    other.run(["scancel", job])
    assert other.wait_state(job) == "CANCELLED"
    other.kill_node("node2")
    other.revive_node("node2")
    assert other.run(["srun", "-wnode2", "hostname"]).stdout == "node2\n"


SHOW = "echo $(hostname):$CUDA_VISIBLE_DEVICES"


@pytest.mark.slurm
def test_the_wrappers_of_env_step_into_the_clusters_version(other):
    wrapper = other.handle.layout.bin / "sinfo"
    done = subprocess.run(
        [str(wrapper), "--version"], cwd="/", capture_output=True, text=True, check=True
    )
    assert done.stdout.split()[-1].startswith(other.handle.spec.slurm)
    assert set(slurminstall.COMMANDS) >= set(wrappers.COMMANDS)
