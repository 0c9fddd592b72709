"""The container of the ranks: the options with which Apptainer, pyxis or podman-hpc runs ``job.image``.

Only the ranks and the checks of their nodes run in the image. The batch step stays on its host, because it
talks to Slurm.

Sources of the options: apptainer(1) of Apptainer 1.4, whose options Singularity 3 has too; the README of
pyxis 0.24; podman-run(1), and the README of podman-hpc 1.1 (``--gpu`` is one of its modules).
"""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.errors import UserError
from hpcrun.run.directory import RunDirectory
from hpcrun.run.sweep_file import is_element
from hpcrun.slurm.commands import run as run_command
from hpcrun.slurm.commands import srun_help_command

if TYPE_CHECKING:
    from hpcrun.config import Job

_PULLED = "image.sif"
# A path with one of these characters cannot stand in a list of mounts.
_SEPARATORS = frozenset(":,\"'\\\n")
_APPTAINER, _PODMAN = ("apptainer", "singularity"), ("podman-hpc",)
# A shell, because job.setup may load the runtime, and a node may have another runtime than the batch host.
# The message has the form of slurmstepd's, which the classification reads.
_FIND = """\
runtime=$({search}) || {{ echo "error: execve(): {names}: No such file or directory" >&2; exit 2; }}
"""
_DEVICES = """\
[ ! -e /dev/kfd ] || gpu=--rocm
[ ! -e /dev/nvidiactl ] || gpu=--nv
"""
_RUN_PODMAN = """\
case $runtime in */podman-hpc) exec "$runtime" run --rm ${{gpu:+--gpu}} {options} "$@" ;; esac
"""
# A run that is not submitted has no pulled image yet: `hpcrun preflight RUN`.
_CHOOSE_IMAGE = '[ -e "$image" ] || image={reference}\n'
# Without these variables the values of the image take precedence.
_RUN_APPTAINER = """\
for name in {variables}; do
    [ -z "${{!name+set}}" ] || export "APPTAINERENV_$name=${{!name}}" "SINGULARITYENV_$name=${{!name}}"
done
exec "$runtime" exec $gpu {options} --pwd "$PWD" "$image" "$@"
"""
# Once for all nodes and all restarts: a tag may move to another image.
_PULL = """\
if hpcrun_runtime=$({search}) && [ ! -e {file} ]; then
"$hpcrun_runtime" pull --force {file}.new {reference}
mv {file}.new {file}
fi"""


@dataclass(frozen=True)
class ImageRequest:
    """The part of the `job:` section that concerns the container.

    ``variables``: the names in ``job.env``. ``gpus``: the ranks use GPUs.
    """

    image: str
    mounts: Sequence[str] = ()
    variables: Sequence[str] = ()
    gpus: bool = True


@dataclass(frozen=True)
class Container:
    """How the ranks start in a container.

    ``setup``: shell lines of the batch script, after ``job.setup``. ``prefix``: the words before the command
    of a rank. ``srun_args``: options for the srun of the ranks. ``python``: the interpreter of the ranks;
    None: that of this process. ``env``: variables for the ranks.
    """

    setup: Sequence[str] = ()
    prefix: Sequence[str] = ()
    srun_args: Sequence[str] = ()
    python: str | None = None
    env: dict[str, str] = field(default_factory=dict)


def image_request(job: "Job") -> ImageRequest | None:
    """Return the request of ``job``; None without ``job.image``."""
    if job.image is None:
        return None
    return ImageRequest(job.image, job.mounts, list(job.env), gpus=not job.cpu)


def container_of(
    request: ImageRequest, run: RunDirectory, folder: Path, *, slurm: bool
) -> Container:
    """Return how the ranks of ``run`` start in their image; asks srun for pyxis if the image can use it.

    Args:
        folder: the working folder of the ranks.
        slurm: the ranks are tasks of srun.
    """
    # pyxis reads no other file, and no folder.
    known = request.image.endswith(".sqsh") or image_file(request.image, folder) is None
    start = _by_pyxis if slurm and known and has_pyxis() else _by_command
    return start(request, run, folder)


def has_pyxis() -> bool:
    """Return True if srun has the options of pyxis."""
    return "--container-image=" in run_command(srun_help_command()).stdout


def _by_pyxis(request: ImageRequest, run: RunDirectory, folder: Path) -> Container:
    image = image_file(request.image, folder) or _enroot(_reference(request.image))
    options = [
        f"--container-image={image}",
        f"--container-mounts={','.join(_mounts(request, run, folder))}",
        f"--container-workdir={folder}",
        # Without this option the values of the image take precedence.
        *([f"--container-env={','.join(request.variables)}"] if request.variables else []),
    ]
    return Container(srun_args=options, python="python3", env=_ONLY_THE_IMAGE)


def _by_command(request: ImageRequest, run: RunDirectory, folder: Path) -> Container:
    file, mounts = image_file(request.image, folder), _mounts(request, run, folder)
    reference = f"docker://{_reference(request.image)}"
    names = _APPTAINER if file else (*_APPTAINER, *_PODMAN)
    pulled = str(run.path / _PULLED)
    apptainer = [word for mount in mounts for word in ("--bind", mount)]
    podman = [
        # As with the other runtimes: the ranks use the node's network, and see its processes.
        *("--network=host", "--ipc=host", "--pid=host", "--entrypoint=", "--env-host"),
        *(f"--env={name}" for name in request.variables),
        *(f"--volume={mount}" for mount in mounts if mount.partition(":")[0] != "/dev/shm"),
        *(f"--workdir={folder}", _reference(request.image)),
    ]
    script = [
        _FIND.format(search=_search(names), names=" or ".join(names)),
        "gpu=\n",
        _DEVICES if request.gpus else "",
        "" if file else _RUN_PODMAN.format(options=shlex.join(podman)),
        f"image={shlex.quote(file or pulled)}\n",
        "" if file else _CHOOSE_IMAGE.format(reference=shlex.quote(reference)),
        _RUN_APPTAINER.format(variables=" ".join(request.variables), options=shlex.join(apptainer)),
    ]
    pull = _PULL.format(
        search=_search(_APPTAINER),
        file=shlex.quote(pulled),
        reference=shlex.quote(reference),
    )
    return Container(
        setup=[] if file else [pull],
        prefix=["bash", "-c", "".join(script), "hpcrun"],
        python="python3",
        env=_ONLY_THE_IMAGE,
    )


# The home folder may be mounted: packages in ~/.local would come before those of the image.
_ONLY_THE_IMAGE = {"PYTHONNOUSERSITE": "1"}


def _mounts(request: ImageRequest, run: RunDirectory, folder: Path) -> list[str]:
    """Return the mounts, each ``SOURCE:DESTINATION`` with options; those of the config come last."""
    # The runs of a sweep use one copy of the code, in the folder of the sweep.
    own = [run.path.parent if is_element(run) else run.path, folder, Path("/dev/shm")]
    given = [mount if ":" in mount else f"{mount}:{mount}" for mount in request.mounts]
    return [*dict.fromkeys(f"{path}:{path}" for path in own), *given]


def _search(names: Sequence[str]) -> str:
    return " || ".join(f"type -P {name}" for name in names)


def image_file(image: str, folder: Path) -> str | None:
    """Return the path of an image that is a file or a folder; None for a reference to a registry."""
    if image.startswith(("/", "./", "../", "~")) or image.endswith((".sif", ".sqsh")):
        return os.path.abspath(folder / Path(image).expanduser())  # noqa: PTH100 (keeps links)
    return None


def _reference(image: str) -> str:
    return image.removeprefix("docker://")


def _enroot(reference: str) -> str:
    """Return ``reference`` in the form of enroot, which separates the registry by #."""
    first, slash, rest = reference.partition("/")
    return f"{first}#{rest}" if slash and ("." in first or ":" in first) else reference


def check_image(job: "Job", run: RunDirectory, folder: Path, *, here: bool) -> None:
    """Check what the submission can know about the image and its mounts.

    Args:
        folder: the working folder of the ranks.
        here: the job runs on this machine.

    Raises:
        UserError: the image is missing, or a path cannot be mounted.
    """
    if job.image is None:
        return
    for path in (run.path, folder):
        if bad := _SEPARATORS.intersection(str(path)):
            raise UserError(
                f"job.image: {path}: a container runtime cannot mount a path with {min(bad)!r}; choose "
                "another folder"
            )
    file = image_file(job.image, folder)
    # Lines of the set-up may copy an image to each node.
    if file is None or job.setup or job.node_setup or Path(file).exists():
        return
    if here or not Path(job.image).is_absolute():
        raise UserError(
            f"job.image: {file}: no such file; check the path, or write a reference to a registry as "
            "docker://NAME:TAG"
        )
