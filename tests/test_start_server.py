"""A program that the start server runs is like a program in its own process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.start_server import VARIABLE

pytestmark = pytest.mark.skipif(
    not os.environ.get(VARIABLE), reason=f"{VARIABLE} is empty, so that no server runs"
)
# Other tests may set variables that libraries read at import.
ENVIRON = {**os.environ}
PROGRAM = """\
import json, os, signal, sys
import torch

if "--wait" in sys.argv:
    signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
    print("waits", flush=True)
    signal.pause()
if "--die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
print(json.dumps({
    "process": os.getpid(), "words": sys.argv, "own": os.environ["OWN"], "folder": os.getcwd(),
    "name": __name__, "first": sys.path[0], "input": sys.stdin.read(),
}))
sys.exit(3)
"""


def start(folder: Path, *words: str, **variables: str) -> "subprocess.Popen[str]":
    (folder / "program.py").write_text(PROGRAM)
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    return subprocess.Popen(
        [sys.executable, "program.py", *words],
        cwd=folder, env={**ENVIRON, "OWN": "yes", **variables}, text=True, **pipes,
    )  # fmt: skip


def test_a_fork_has_the_state_of_its_program(tmp_path: Path) -> None:
    program = start(tmp_path, "a", "b")
    found = json.loads(program.communicate("given")[0])
    assert program.returncode == 3
    assert found.pop("process") != program.pid
    assert found == {
        "words": ["program.py", "a", "b"], "own": "yes", "folder": str(tmp_path),
        "name": "__main__", "first": str(tmp_path), "input": "given",
    }  # fmt: skip


def test_a_program_ends_as_its_fork_does(tmp_path: Path) -> None:
    waits, dies = start(tmp_path, "--wait"), start(tmp_path, "--die")
    assert waits.stdout
    assert waits.stdout.readline() == "waits\n"
    waits.send_signal(signal.SIGUSR1)
    assert (waits.wait(), dies.wait()) == (75, -signal.SIGKILL)


@pytest.mark.parametrize("shadow", [False, True])
def test_a_program_with_other_imports_runs_itself(shadow: bool, tmp_path: Path) -> None:
    if shadow:
        (tmp_path / "torch.py").touch()
    variables = {} if shadow else {"TORCH_LOGS": "+dynamo"}
    program = start(tmp_path, **variables)
    found = json.loads(program.communicate("")[0])
    assert found["process"] == program.pid
