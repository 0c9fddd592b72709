"""The launcher's arguments that make one training of the launchers on all nodes."""

import sys
from pathlib import Path

import pytest

from hpcrun.config.commands.command import Launcher, launching_python

NODE = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "4711"}


def test_torchrun_gets_all_nodes_and_outlives_the_warning() -> None:
    words = Launcher("torchrun", 4, "/env/python").words(["train.py", "--lr", "1"], NODE)
    assert words[:3] == ["sh", "-c", 'trap "" USR1 USR2; exec "$@"']
    assert words[4:] == [
        *("/env/python", "-m", "torch.distributed.run"),
        *("--nnodes=2", "--node-rank=1"),
        *(
            "--nproc-per-node=4",
            "--master-addr=node1",
            "--master-port=4711",
            "train.py",
            "--lr",
            "1",
        ),
    ]


def accelerate(command: list[str], home: Path, **changes: str) -> list[str]:
    """Return accelerate's arguments on a node with one GPU, without its name and the script's arguments."""
    environ = {**NODE, "HF_HOME": str(home), **changes}
    words = Launcher("accelerate", 1, "python").words([*command, "train.py"], environ)
    assert words[5:7] == ["-m", "accelerate.commands.launch"]
    return words[7:-1]


def test_accelerate_starts_all_ranks_unless_it_is_configured(tmp_path: Path) -> None:
    meeting = ["--main_process_ip=node1", "--main_process_port=4711"]
    two = ["--num_machines=2", "--machine_rank=1", "--num_processes=2", *meeting]
    assert accelerate([], tmp_path) == ["--multi_gpu", *two]
    mixed = ["--mixed_precision", "bf16"]
    assert accelerate(mixed, tmp_path) == ["--multi_gpu", *two, *mixed]
    assert accelerate(["--use_fsdp"], tmp_path) == [*two, "--use_fsdp"]
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").touch()
    assert accelerate([], tmp_path) == two


def test_accelerate_takes_no_several_gpus_for_one_rank(tmp_path: Path) -> None:
    alone = accelerate([], tmp_path, WORLD_SIZE="1", RANK="0")
    assert alone[0] == "--num_machines=1"


def make_python(folder: Path, code: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{code}\n")
    path.chmod(0o755)
    return str(path)


def test_the_interpreter_is_of_the_job_or_of_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert launching_python("/container/python", "torchrun") == sys.executable
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launching_python(None, "torchrun") == sys.executable
    on_path = make_python(tmp_path, "exit 0")
    assert launching_python(None, "torchrun") == on_path


@pytest.mark.parametrize("code", ["exit 1", "kill -KILL $$"])
def test_a_python_without_torch_gives_way_to_the_own_interpreter(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    on_path = make_python(tmp_path, code)
    assert launching_python(None, "torchrun") == sys.executable
    # The error of the named interpreter is clearer than that of another one without the package.
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert launching_python(None, "torchrun") == on_path
