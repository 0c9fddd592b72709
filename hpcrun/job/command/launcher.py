"""torchrun or ``accelerate launch`` as the only task of a node, with arguments for the common rendezvous."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

LauncherName = Literal["torchrun", "accelerate"]

# The launchers have no handler for the warning before a time limit: they and their ranks would die of
# it. A rank that sets a handler still receives the signal.
_OUTLIVE_WARNING = 'trap "" USR1 USR2; exec "$@"'
_KEEP_CODE = str(Path(__file__).with_name("keep_code.py"))
_PACKAGES: Mapping[LauncherName, str] = {"torchrun": "torch", "accelerate": "accelerate"}
# Seconds for an interpreter on a slow file system.
_ANSWER = 60.0
# With one of these options, accelerate starts its ranks correctly.
_CHOSEN = frozenset(
    {
        *("--config-file", "--multi-gpu", "--tpu", "--use-deepspeed", "--use-fsdp"),
        "--use-megatron-lm",
    }
)


@dataclass(frozen=True)
class Launcher:
    """A launcher that starts ``ranks`` ranks on each node, with the interpreter ``python``."""

    name: LauncherName
    ranks: int
    python: str

    def words(self, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
        """Return this task's command line, so that ``command`` becomes one training over all nodes.

        Args:
            command: the script and its arguments, after options of the launcher if there are any.
            environ: the variables of the task: WORLD_SIZE counts the nodes, RANK is this node.
        """
        if self.name == "torchrun":
            own = _torchrun(self.ranks, environ)
        else:
            own = _accelerate(self.ranks, command, environ)
        return ["sh", "-c", _OUTLIVE_WARNING, "sh", self.python, _KEEP_CODE, *own, *command]


def launching_python(asked: str | None, name: LauncherName) -> str:
    """Return the interpreter for the launcher ``name``.

    A job that names an interpreter runs the worker with it. Otherwise `python` on PATH comes first, as in the
    user's own shell. The worker's interpreter is used if only it has the launcher, for example after a
    submission with the full path of an environment's Python, which leaves PATH unchanged.

    Args:
        asked: ``job.python``.
    """
    found = None if asked else shutil.which("python") or shutil.which("python3")
    if found is None:
        return sys.executable
    package = _PACKAGES[name]
    only_here = importlib.util.find_spec(package) is not None and not _has(found, package)
    return sys.executable if only_here else found


def _has(python: str, package: str) -> bool:
    """Return True if ``python`` finds ``package``; True if the answer takes too long."""
    code = f"import importlib.util, sys; sys.exit(importlib.util.find_spec({package!r}) is None)"
    try:
        asked = subprocess.run(
            [python, "-c", code],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_ANSWER,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return True
    except OSError:
        return False
    return asked.returncode == 0


def _torchrun(ranks: int, environ: Mapping[str, str]) -> list[str]:
    return [
        "torch.distributed.run",
        f"--nnodes={environ['WORLD_SIZE']}",
        f"--node-rank={environ['RANK']}",
        f"--nproc-per-node={ranks}",
        f"--master-addr={environ['MASTER_ADDR']}",
        f"--master-port={environ['MASTER_PORT']}",
    ]


def _accelerate(ranks: int, command: Sequence[str], environ: Mapping[str, str]) -> list[str]:
    machines = int(environ["WORLD_SIZE"])
    given = {word.partition("=")[0].replace("_", "-") for word in _before_script(command)}
    # Without --multi_gpu, nodes with one GPU would each train a model. On CPUs it is the only way to
    # several processes without MPI. It would override the user's file of defaults.
    plain = machines * ranks > 1 and given.isdisjoint(_CHOSEN) and not _has_defaults(environ)
    return [
        "accelerate.commands.launch",
        *(["--multi_gpu"] if plain else []),
        f"--num_machines={machines}",
        f"--machine_rank={environ['RANK']}",
        f"--num_processes={machines * ranks}",
        f"--main_process_ip={environ['MASTER_ADDR']}",
        f"--main_process_port={environ['MASTER_PORT']}",
    ]


def _before_script(command: Sequence[str]) -> Sequence[str]:
    script = next((at for at, word in enumerate(command) if word.endswith(".py")), len(command))
    return command[:script]


def _has_defaults(environ: Mapping[str, str]) -> bool:
    """Return True if `accelerate config` has written a file (accelerate.commands.config.config_args)."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "huggingface"
    folder = Path(environ.get("HF_HOME") or cache) / "accelerate"
    return (folder / "default_config.yaml").is_file()
