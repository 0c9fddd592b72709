"""Commands that start their own ranks are recognized behind the words in front of them."""

import shlex
from pathlib import Path

import pytest

from hpcrun.errors import UserError
from hpcrun.job.script.command import rank_starter, require_script, separate_trainings


@pytest.mark.parametrize(
    ("line", "name"),
    [
        ("torchrun --nproc-per-node 2 train.py", "torchrun"),
        ("/opt/env/bin/torchrun train.py", "torchrun"),
        ("python -m torch.distributed.run train.py", "python -m torch.distributed.run"),
        ("python3.11 -u -W ignore -mtorch.distributed.launch x.py", "python -m torch.distributed.launch"),
        ("python -um torch.distributed.run train.py", "python -m torch.distributed.run"),
        ("accelerate launch --cpu train.py", "accelerate launch"),
        ("python -m accelerate.commands.launch train.py", "python -m accelerate.commands.launch"),
        ("deepspeed --num_gpus 2 train.py", "deepspeed"),
        ("env -u A OMP_NUM_THREADS=4 torchrun train.py", "torchrun"),
        ("A=1 uv run --with torch torchrun train.py", "torchrun"),
        ("srun --ntasks 1 conda run -n torch python -m torch.distributed.run x.py",
         "python -m torch.distributed.run"),
        ("bash -c 'exec torchrun train.py'", "torchrun"),
        ("bash -lc 'cd code && A=1 torchrun train.py | tee log'", "torchrun"),
        ("nohup bash -o pipefail -c 'if true; then torchrun x.py; fi'", "torchrun"),
        ("apptainer exec --nv image.sif torchrun train.py", "torchrun"),
        ("bash -c 'python prepare.py && torchrun train.py'", "torchrun"),
    ],
)  # fmt: skip
def test_a_starter_of_ranks_is_seen(line: str, name: str, tmp_path: Path) -> None:
    found = rank_starter(shlex.split(line), tmp_path)
    assert found is not None
    assert found[0] == name


@pytest.mark.parametrize(
    "line",
    [
        "python train.py --launcher torchrun",
        "python train.py torchrun",
        "python -m my.torchrun train.py",
        "-m my.train --strategy deepspeed",
        "accelerate config",
        "uv run train.py torchrun",
        "bash -c 'python train.py # torchrun'",
        "bash missing.sh torchrun",
        "./torchrun.py",
        "A=1",
        "pip show deepspeed",
        "uv pip install deepspeed",
        "python -m pip install deepspeed",
        "bash -c 'module load deepspeed; which torchrun && python train.py'",
    ],
)
def test_a_word_that_only_looks_like_one_is_skipped(line: str, tmp_path: Path) -> None:
    assert rank_starter(shlex.split(line), tmp_path) is None


def test_a_shell_script_is_read_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "go.sh").write_text(
        "#!/bin/bash\nset -e\n# torchrun\ntorchrun \\\n  --nnodes 1 t.py\n"
    )
    found = rank_starter(["bash", "go.sh"], tmp_path)
    assert found is not None
    assert found[0] == "torchrun"
    (tmp_path / "go.sh").write_text("bash go.sh\n")
    assert rank_starter(["bash", "go.sh"], tmp_path) is None


def test_the_warning_counts_the_trainings_and_names_the_remedy(tmp_path: Path) -> None:
    def told(line: str, nodes: int, tasks: int) -> str | None:
        return separate_trainings(shlex.split(line), tmp_path, nodes=nodes, tasks=tasks)

    line = told("torchrun --nproc-per-node 2 train.py", 2, 2)
    assert line is not None
    for part in (
        "torchrun",
        "4 tasks (2 x 2)",
        "4 separate trainings",
        "--launcher torchrun -- train.py",
    ):
        assert part in line
    # One per node, but they do not know of each other.
    assert "2 separate trainings" in str(told("torchrun train.py", 2, 1))
    assert "--launcher accelerate" in str(told("accelerate launch train.py", 2, 1))
    assert told("torchrun train.py", 1, 1) is None
    assert told("python train.py", 2, 2) is None
    # Words that show a correct start.
    assert told("bash -c 'torchrun --nnodes $WORLD_SIZE --node-rank $RANK x.py'", 2, 4) is None
    assert told("torchrun --nnodes=2 --rdzv_endpoint=h:1 x.py", 2, 1) is None
    # The script's own option does not count.
    assert told("torchrun train.py --nnodes 2", 2, 1) is not None


@pytest.mark.parametrize(
    ("launcher", "line", "part"),
    [
        ("torchrun", "python train.py", "the command begins with python; write only the script"),
        ("torchrun", "torchrun train.py", "starts its ranks by itself (torchrun)"),
        (
            "accelerate",
            "accelerate launch train.py",
            "starts its ranks by itself (accelerate launch)",
        ),
        ("accelerate", "--cpu train.py", "--cpu means one process on a node"),
    ],
)
def test_a_launcher_takes_a_script_and_nothing_else(
    launcher: str, line: str, part: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError) as told:
        require_script(launcher, shlex.split(line), tmp_path)
    assert part in str(told.value)
    require_script(launcher, ["--max-restarts", "0", "train.py", "--cpu"], tmp_path)
