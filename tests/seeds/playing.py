"""Runs the programs of ``programs/``: as forked ranks with torchrun's variables, or by a real launcher."""

import os
import runpy
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support.jobs import PATIENCE
from tests.support.ports import free_port
from tests.support.training.forks import fork_ranks

PROGRAMS = Path(__file__).with_name("programs")


def play(name: str, folder: Path, world_size: int, *words: str) -> list[str]:
    """Run a program in ``folder`` as forked ranks of one node; return the output of each rank.

    For a test with ``@forked``: its process has imported torch.
    """
    port, logs = free_port(), folder / f"logs-{len([*folder.glob('logs-*')])}"
    logs.mkdir()

    def rank_of(rank: int) -> None:
        os.chdir(folder)
        if world_size > 1:
            os.environ |= {
                **{"RANK": str(rank), "LOCAL_RANK": str(rank), "GROUP_RANK": "0"},
                **{"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)},
                **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
            }
        sys.argv = [name, *words]
        runpy.run_path(str(PROGRAMS / name), run_name="__main__")

    codes = fork_ranks(world_size, rank_of, logs)
    texts = [(logs / f"rank-{rank}.log").read_text() for rank in range(world_size)]
    assert codes == [0] * world_size, "\n".join(texts)
    return texts


def start(
    folder: Path, *words: str, environ: Mapping[str, str] | None = None
) -> "subprocess.Popen[str]":
    """Start Python with ``words`` in ``folder``, outside of any job."""
    return subprocess.Popen(
        [sys.executable, *words],
        cwd=folder, env={**os.environ, **(environ or {})}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def output(*processes: "subprocess.Popen[str]") -> str:
    """Wait for the processes, require success, and return what they printed, one after the other."""
    found = [process.communicate(timeout=PATIENCE) for process in processes]
    for process, (_, errors) in zip(processes, found, strict=True):
        assert process.returncode == 0, errors
    return "".join(printed for printed, _ in found)


def loss_of(text: str) -> float:
    """Return the loss that a program printed at its end."""
    (line,) = (line for line in text.splitlines() if line.startswith("final loss "))
    return float(line.split()[-1])
