"""The command lines of container runtimes, and images and mounts that a submission refuses."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from hpcrun.config import ConfigError, Job, override_layer, resolve
from hpcrun.errors import UserError
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.containers import (
    Container,
    ImageRequest,
    check_image,
    container_of,
    image_request,
)
from hpcrun.slurm.local.submission import local_container, worker

RUN, FOLDER = RunDirectory(Path("/runs/gpt")), Path("/home/me")
OWN = ["/runs/gpt:/runs/gpt", "/home/me:/home/me", "/dev/shm:/dev/shm"]


def write(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH with the system's programs, and a folder for runtimes in front of it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    write(folder / "srun", "echo no such option")
    return folder


def words_of(container: Container, folder: Path, **environ: str) -> list[str]:
    """Return the words with which the prefix of a rank's command starts its runtime."""
    command = [*container.prefix, "python3", "-m", "rank"]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, **environ}, capture_output=True, text=True, check=True
    )  # fmt: skip
    return done.stdout.splitlines()


SHOW = 'printf "%s\\n" "$@"'


def request_of(image: str, **keys: object) -> ImageRequest:
    made = image_request(Job.model_validate({"image": image, **keys}))
    assert made is not None
    return made


@pytest.mark.parametrize("name", ["apptainer", "singularity"])
def test_a_file_runs_in_the_runtime_of_the_node(programs: Path, tmp_path: Path, name: str) -> None:
    write(programs / name, f'{SHOW}; echo "$APPTAINERENV_KEY|$SINGULARITYENV_KEY"')
    request = request_of(
        "train.sif", mounts=["/data", "/sets:/in:ro"], env={"KEY": "1", "GONE": ""}, cpu=True
    )
    container = container_of(request, RUN, FOLDER, slurm=True)
    mounts = [*OWN, "/data:/data", "/sets:/in:ro"]
    binds = [word for mount in mounts for word in ("--bind", mount)]
    assert words_of(container, tmp_path, KEY="a, b") == [
        *("exec", *binds, "--pwd", str(tmp_path), "/home/me/train.sif", "python3", "-m", "rank"),
        "a, b|a, b",
    ]
    assert (container.setup, container.srun_args) == ([], ())
    assert (container.python, container.env) == ("python3", {"PYTHONNOUSERSITE": "1"})


def test_pyxis_gets_options_of_srun(programs: Path) -> None:
    write(programs / "srun", "echo '      --container-image=[USER@][REGISTRY#]IMAGE[:TAG]|PATH'")
    request = request_of(
        "nvcr.io/nvidia/pytorch:26.05-py3", mounts=["/data"], env={"A": "1", "B": "2"}
    )
    container = container_of(request, RUN, FOLDER, slurm=True)
    assert container.srun_args == [
        "--container-image=nvcr.io#nvidia/pytorch:26.05-py3",
        f"--container-mounts={','.join([*OWN, '/data:/data'])}",
        "--container-workdir=/home/me",
        "--container-env=A,B",
    ]
    assert (container.prefix, container.setup) == ((), ())
    for image, taken in {
        "docker://ubuntu:24.04": "ubuntu:24.04",
        "docker://localhost:5000/train": "localhost:5000#train",
        "org/train:1": "org/train:1",
        "./train.sqsh": "/home/me/train.sqsh",
    }.items():
        words = container_of(request_of(image), RUN, FOLDER, slurm=True).srun_args
        assert words[0] == f"--container-image={taken}"
    # Only Apptainer reads these, and only srun has the options.
    for image, slurm in (("/train.sif", True), ("/unpacked", True), ("/train.sqsh", False)):
        assert container_of(request_of(image), RUN, FOLDER, slurm=slurm).srun_args == ()


def test_podman_hpc_runs_a_reference(programs: Path, tmp_path: Path) -> None:
    write(programs / "podman-hpc", SHOW)
    request = request_of(
        "docker://org/train:1", mounts=["/data:/in:ro"], env={"KEY": "1"}, cpu=True
    )
    container = container_of(request, RUN, FOLDER, slurm=True)
    assert words_of(container, tmp_path) == [
        *(
            "run",
            "--rm",
            "--network=host",
            "--ipc=host",
            "--pid=host",
            "--entrypoint=",
            "--env-host",
        ),
        *("--env=KEY", "--volume=/runs/gpt:/runs/gpt", "--volume=/home/me:/home/me"),
        *("--volume=/data:/in:ro", "--workdir=/home/me", "org/train:1", "python3", "-m", "rank"),
    ]
    # Nothing is pulled for podman-hpc, which has its own store.
    subprocess.run(["bash", "-euc", *container.setup], check=True)


def test_apptainer_pulls_a_reference_once_into_the_run(programs: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "a run")
    run.path.mkdir()
    write(programs / "apptainer", f'{SHOW}; [ "$1" = exec ] || echo image > "$3"')
    container = container_of(request_of("org/train:1", cpu=True), run, FOLDER, slurm=True)
    assert "docker://org/train:1" in words_of(container, tmp_path)
    (line,) = container.setup
    for expected in (["pull", "--force", f"{run.path}/image.sif.new", "docker://org/train:1"], []):
        done = subprocess.run(["bash", "-euc", line], capture_output=True, text=True, check=True)
        assert done.stdout.splitlines() == expected
    assert f"{run.path}/image.sif" in words_of(container, tmp_path)
    (run.path / "image.sif").unlink()
    write(programs / "apptainer", "exit 3")
    assert subprocess.run(["bash", "-euc", line], check=False).returncode == 3
    assert list(run.path.iterdir()) == []


def test_the_local_cluster_has_no_pyxis(programs: Path) -> None:
    write(programs / "srun", "echo --container-image=")
    job = Job.model_validate({"image": "/train.sqsh", "python": "/opt/python"})
    prefix = local_container(RUN, job).prefix
    assert prefix[:2] == ["bash", "-c"]
    assert worker(RUN, job)[: len(prefix) + 1] == [*prefix, "/opt/python"]


def test_the_folder_of_a_sweep_is_mounted(programs: Path, tmp_path: Path) -> None:
    (tmp_path / "sweep.json").write_text("{}")
    write(programs / "apptainer", SHOW)
    run = RunDirectory(tmp_path / "003")
    container = container_of(request_of("train.sif"), run, FOLDER, slurm=True)
    assert f"{tmp_path}:{tmp_path}" in words_of(container, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ["job.image=oras://host/image"],
            "should be a .sif or .sqsh file, a path with / or ./ in front",
        ),
        (["job.image=nvcr.io#nvidia/pytorch"], "or a reference to a registry such as docker://"),
        (["job.image=/a,b.sif"], "may not contain ','"),
        (["job.image=a.sif", "job.mounts=[data]"], "should be a full path, SOURCE:DESTINATION"),
        (
            ["job.image=a.sif", "job.mounts=[/a:/b:rw+x]"],
            "should be a full path, SOURCE:DESTINATION",
        ),
        (["job.image=a.sif", "job.mounts=[/scratch/$USER]"], "may not contain '$'"),
        (["job.mounts=[/data]"], "job.mounts: needs job.image"),
        (["job.image=a.sif", "job.container=[env]"], "omit job.container"),
        (
            ["job.image=a.sif", "job.executor=debug", "job.cpu=true"],
            "debug runs the rank in this process",
        ),
    ],
)
def test_bad_keys_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve([override_layer(overrides)])
    assert words in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def test_a_missing_image_is_refused_if_the_submission_can_know(tmp_path: Path) -> None:
    def refusal(image: str, here: bool = False, **keys: object) -> str:
        try:
            check_image(Job.model_validate({"image": image, **keys}), RUN, tmp_path, here=here)
        except UserError as error:
            return str(error)
        return ""

    missing = f"job.image: {tmp_path}/a.sif: no such file; check the path"
    assert refusal("a.sif").startswith(missing)
    assert refusal(f"{tmp_path}/a.sif", here=True).startswith(missing)
    # It may be on the nodes only, or the set-up copies it there.
    assert refusal("/local/a.sif") == refusal("a.sif", node_setup=["cp a.sif /local"]) == ""
    assert refusal("org/train:1", here=True) == ""
    (tmp_path / "a.sif").touch()
    assert refusal("a.sif") == ""
    job = Job.model_validate({"image": "a.sif"})
    with pytest.raises(UserError, match="cannot mount a path with ','"):
        check_image(job, RunDirectory(tmp_path / "a,b"), tmp_path, here=False)
