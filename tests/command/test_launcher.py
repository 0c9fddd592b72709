"""The arguments that make one training of a launcher on each node."""

import sys
from pathlib import Path

import pytest

from hpcrun.command.launcher import Launcher, launching_python

NODE = {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "node1", "MASTER_PORT": "4711"}


def test_torchrun_is_told_of_all_nodes_and_outlives_the_warning() -> None:
    words = Launcher("torchrun", 4, "/env/python").words(["train.py", "--lr", "1"], NODE)
    assert words[:3] == ["sh", "-c", 'trap "" USR1 USR2; exec "$@"']
    assert words[4:] == [
        *("/env/python", "-m", "torch.distributed.run", "--nnodes=2", "--node-rank=1"),
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
    """The arguments of accelerate on a node with one GPU, without its name and those of the script."""
    environ = {**NODE, "HF_HOME": str(home), **changes}
    words = Launcher("accelerate", 1, "python").words([*command, "train.py"], environ)
    assert words[5:7] == ["-m", "accelerate.commands.launch"]
    return words[7:-1]


def test_accelerate_starts_all_ranks_unless_it_was_told_how(tmp_path: Path) -> None:
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


def test_the_interpreter_is_the_one_that_the_job_names_or_pythons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert launching_python("/container/python") == sys.executable
    monkeypatch.setenv("PATH", str(tmp_path))
    assert launching_python(None) == sys.executable
    (tmp_path / "python").touch(mode=0o755)
    assert launching_python(None) == str(tmp_path / "python")
