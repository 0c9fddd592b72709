"""Commands that start their own ranks are recognized behind the words in front of them."""

import shlex
from pathlib import Path

import pytest

from hpcrun.config.commands.command import require_script
from hpcrun.config.commands.starters import rank_starter
from hpcrun.errors import UserError


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
        ("conda run -n torch python -m torch.distributed.run x.py", "python -m torch.distributed.run"),
        ("srun --ntasks 1 conda run -n torch python -m torch.distributed.run x.py", "srun"),
        ("time /usr/bin/srun -n 4 python t.py", "srun"),
        ("env -u A X=1 nohup srun python t.py", "srun"),
        ("taskset -c 0-3 mpirun -np 4 a.out", "mpirun"),
        ("timeout -k 5 60 mpiexec -n 2 python t.py", "mpiexec"),
        ("bash -c 'if true; then srun python t.py; fi'", "srun"),
        ("bash -c 'J=$(sbatch --parsable run.sbatch)'", "sbatch"),
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
    assert found.name == name


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
        "./train --launcher mpirun",
        "bash -c 'module load mpirun; echo srun; python train.py --mpi srun'",
        "python t.py srun",
        "bash -c 'squeue; python t.py'",
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
    assert found.name == "torchrun"
    (tmp_path / "go").write_text("#!/usr/bin/env bash\nnice -n 5 mpirun a.out\n")
    found = rank_starter(["./go"], tmp_path)
    assert found is not None
    assert (found.name, found.direct) == ("mpirun", False)
    (tmp_path / "go.sh").write_text("bash go.sh\n")
    assert rank_starter(["bash", "go.sh"], tmp_path) is None


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
