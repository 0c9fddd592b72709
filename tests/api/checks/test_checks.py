"""Each check of a submission finds its mistakes, and passes sound submissions."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrun.api.submission.checks import (
    interpreter,
    launchers,
    limits,
    script_options,
    shell_text,
    slurm_options,
)
from hpcrun.api.submission.checks.checklist import check_submission, checks_for
from hpcrun.api.submission.checks.concern import Concern, Submission
from hpcrun.config import Config, ConfigError

RUN_SBATCH = """#!/bin/bash
#SBATCH -N 4 --time=2:00:00  # two hours
#SBATCH --gres=gpu:a100:4
#SBATCH --output=x --mail-type END
module load x
srun -n 16 --cpu-bind=cores python train.py --lr 1
"""


@pytest.fixture
def submission(tmp_path: Path) -> Callable[..., Submission]:
    """A function from a command line and keys of the job to a submission in a folder with scripts."""
    (tmp_path / "run.sbatch").write_text(RUN_SBATCH)
    (tmp_path / "pipe.sh").write_text("set -e\npython t.py \\\n  --lr 1 2>&1 | tee log\n")
    (tmp_path / "t.py").write_text("import argparse\nprint('no option')\n")
    (tmp_path / "own.py").write_text(
        "from t import x\nparser.add_argument('--dry_run'); nodes = 1\n"
    )
    (tmp_path / "one.yaml").write_text("num_machines: 1\nnum_processes: 2\n")
    (tmp_path / "two.yaml").write_text("machine_rank: 0\nnum_machines: 2\nrdzv_backend: c10d\n")
    (tmp_path / "hidden.py").write_text("import an_unknown_package\n")

    def make(line: str = "", **job: Any) -> Submission:
        return Submission(Config(command=shlex.split(line), job=job), tmp_path)

    return make


FOUR = {"nodes": 2, "gpus": 2}
ONE_EACH = {"nodes": 2, "gpus": 2, "tasks_per_node": 1}


@pytest.mark.parametrize(
    ("line", "job", "refused", "part"),
    [
        ("srun python t.py", FOUR, True, "without srun: -- python t.py"),
        ("time srun -N 2 -n4 --label python t.py", FOUR, True, "without srun: -- python t.py"),
        ("/usr/bin/srun python t.py", {}, True, "waits for the resources of this step"),
        ("env X=1 srun --overlap python t.py", FOUR, False, "each of the 4 tasks would start more ranks"),
        ("bash -c 'srun python t.py'", FOUR, False, "without srun: -- python t.py"),
        ("bash run.sbatch", FOUR, False, "-- python train.py --lr 1"),
        ("bash -c 'srun nvidia-smi; python t.py'", FOUR, False, "this line without srun: nvidia-smi"),
        ("bash -c 'srun --overlap nvidia-smi; srun python t.py'", FOUR, False, "srun: -- python t.py"),
        ("bash -c 'srun --overlap hostname -s; torchrun t.py'", FOUR, False, "4 separate trainings"),
        ("torchrun t.py --help", FOUR, True, "4 separate trainings"),
        ("torchrun", FOUR, True, "4 separate trainings"),
        ("mpirun -np 4 ./a.out --version", FOUR, True, "without mpirun"),
        ("bash -c 'srun --overlap ./a.out'", FOUR, False, "each of the 4 tasks would start more"),
        ("sbatch run.sbatch", FOUR, True, "-- python train.py --lr 1"),
        ("sbatch --parsable missing.sh", {}, True, "-- COMMAND"),
        ("salloc -N 2 python t.py", FOUR, True, "-- python t.py"),
        ("mpirun -np 4 python t.py", FOUR, True, "without mpirun: -- python t.py (with MPI"),
        ("nohup mpiexec -n 4 ./a.out", FOUR, True, "without mpiexec: -- COMMAND"),
        ("horovodrun -np 4 python t.py", ONE_EACH, True, "--nodes 1 --launcher none"),
        ("bash -c 'mpirun -np 4 python t.py'", FOUR, False, "without mpirun"),
        ("torchrun --nproc-per-node 2 t.py --x", FOUR, True, "--launcher torchrun -- t.py --x"),
        ("torchrun t.py --nnodes 2", ONE_EACH, True, "2 tasks (2 x 1) would start it: 2 separate"),
        ("python -m torch.distributed.run t.py", FOUR, True, "4 separate trainings"),
        ("accelerate launch t.py", ONE_EACH, True, "--launcher accelerate -- t.py"),
        ("accelerate launch --config_file one.yaml t.py", ONE_EACH, True, "--launcher accelerate"),
        ("deepspeed --num_gpus 2 t.py", FOUR, True, "--launcher torchrun -- t.py"),
        ("bash -c 'torchrun t.py'", FOUR, False, "4 separate trainings"),
        ("uv run torchrun t.py", FOUR, False, "4 separate trainings"),
        ("torchrun --nnodes=4 --rdzv-endpoint=h:1 t.py", ONE_EACH, True, "waits for 4 starts, but"),
        ("torchrun --nnodes 2 --rdzv_endpoint h:1 t.py", FOUR, False, "the job starts it 4 times"),
        ("torchrun --nproc_per_node=4 t.py", {"gpus": 2, "tasks_per_node": 1}, False, "2 GPUs or"),
        ("accelerate launch --num_processes 2 t.py", {"gpus": 4, "tasks_per_node": 1}, False, "4 GP"),
        ("--nproc-per-node 4 t.py", {**FOUR, "launcher": "torchrun"}, True, "passes --nproc-per"),
        ("--num_machines=4 t.py", {**FOUR, "launcher": "accelerate"}, True, "passes --num-machi"),
    ],
)  # fmt: skip
def test_a_command_that_starts_ranks_gets_the_right_form(
    line: str, job: dict[str, Any], refused: bool, part: str, submission: Callable[..., Submission]
) -> None:
    found = [one for check in LAUNCHER_CHECKS for one in check(submission(line, **job))]
    assert [one.refused for one in found] == [refused], found
    assert part in found[0].text


LAUNCHER_CHECKS = (
    launchers.nested_steps,
    launchers.nested_jobs,
    launchers.nested_mpi,
    launchers.separate_trainings,
    launchers.other_counts,
)


@pytest.mark.parametrize(
    ("line", "job"),
    [
        ("python t.py", FOUR),
        ("torchrun t.py", {}),
        ("torchrun --nproc-per-node 2 t.py", {"gpus": 2, "tasks_per_node": 1}),
        ("torchrun --nproc-per-node gpu t.py", {"gpus": 2, "tasks_per_node": 1}),
        ("torchrun --nnodes=2 --rdzv_endpoint=h:1 --nproc-per-node=2 t.py", ONE_EACH),
        ("torchrun --nnodes 2:4 --rdzv_endpoint=h:1 t.py", ONE_EACH),
        ("torchrun t.py", {**ONE_EACH, "env": {"PET_NNODES": "2", "PET_RDZV_ENDPOINT": "h:1"}}),
        ("accelerate launch --config_file two.yaml t.py", ONE_EACH),
        ("bash -c 'torchrun --nnodes $WORLD_SIZE --node-rank $RANK x.py'", FOUR),
        ("mpirun -np 4 python t.py", {"gpus": 4, "tasks_per_node": 1}),
        ("srun --overlap -n 4 python t.py", {"gpus": 4, "tasks_per_node": 1}),
        ("bash -c 'srun --overlap nvidia-smi; python t.py'", FOUR),
        ("bash -c 'srun -N1 --overl free -g && python t.py'", FOUR),
        *((f"{one} --help", FOUR) for one in ("torchrun", "mpiexec", "srun", "accelerate launch")),
        ("python -m torch.distributed.run -h", FOUR),
        ("bash -c 'mpirun --version; python t.py'", FOUR),
        ("env SLURM_OVERLAP=1 srun -n 4 python t.py", {"gpus": 4, "tasks_per_node": 1}),
        ("./train --launcher mpirun", FOUR),
        ("--max-restarts 0 t.py --nnodes 4", {**FOUR, "launcher": "torchrun"}),
        ("--nproc-per-node 2 t.py", {**FOUR, "launcher": "torchrun"}),
        ("", FOUR),
    ],
)
def test_a_sound_command_gets_no_word(
    line: str, job: dict[str, Any], submission: Callable[..., Submission]
) -> None:
    assert [one for check in LAUNCHER_CHECKS for one in check(submission(line, **job))] == []


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("bash -c 'python t.py | tee log'", "python t.py | …: the pipe hides"),
        ("bash -c 'cd x && python t.py 2>&1 |& tee log'", "python t.py 2 |& …"),
        ("bash pipe.sh", "python t.py --lr 1 2 | …"),
        ("sh -c 'torchrun t.py | cat'", "torchrun t.py | …"),
        ("bash -c 'A=1 python3 t.py || true'", "remove `|| true`"),
        ("bash -c 'python t.py > log || echo failed'", "remove `|| echo`"),
        ("bash -c 'nohup python t.py > log 2>&1 &'", "does not wait"),
        ("bash -c 'python prepare.py; python t.py &'", "python t.py &: the shell does not wait"),
    ],
)
def test_a_hidden_exit_code_gets_a_line(
    line: str, part: str, submission: Callable[..., Submission]
) -> None:
    (found,) = shell_text.hidden_exit_codes(submission(line))
    assert not found.refused
    assert part in found.text


@pytest.mark.parametrize(
    "line",
    [
        "bash -o pipefail -c 'python t.py | tee log'",
        "bash -c 'set -eo pipefail; python t.py | tee log'",
        "bash -c 'python t.py | tee log; exit ${PIPESTATUS[0]}'",
        "bash -c 'N=$(nvidia-smi -L | wc -l); python t.py --n $N'",
        "bash -c 'python t.py --pattern \"a|b\"'",
        "bash -c 'python t.py & wait $!'",
        "bash -c 'python t.py > log 2>&1'",
        "bash -c 'python -m tensorboard.main --logdir x & python t.py'",
        "bash -c 'python watch.py & HELPER=$!; python t.py; CODE=$?; kill $HELPER; exit $CODE'",
        "bash -c 'mkdir x || true; python t.py'",
        "bash -c 'echo 1 | python -c \"print(input())\"'",
        'bash -c "echo it\'s"',
        "bash missing.sh",
        "python t.py",
    ],
)
def test_a_shell_that_passes_the_code_on_is_silent(
    line: str, submission: Callable[..., Submission]
) -> None:
    assert [*shell_text.hidden_exit_codes(submission(line))] == []


def test_ignored_lines_for_sbatch_are_translated(submission: Callable[..., Submission]) -> None:
    (found,) = shell_text.ignored_requests(submission("bash run.sbatch"))
    assert found.text.endswith(
        "hpcrun submit --nodes 4 --time 2:00:00 --gpus a100:4 'job.sbatch_args=[--mail-type=END]' -- "
        "python train.py --lr 1"
    )
    given = {"nodes": 4, "time": "2:00:00", "gpus": 4, "gpu_type": "a100"}
    asked = submission("bash run.sbatch", **given, sbatch_args=["--mail-type=END"])
    assert [*shell_text.ignored_requests(asked)] == []
    assert [*shell_text.ignored_requests(submission("python run.sbatch"))] == []


@pytest.mark.parametrize(
    ("line", "options"),
    [
        ("python t.py --nodes 2", "--nodes"),
        ("python -u t.py --lr 1 --gpus=2 --dry-run", "--gpus and --dry-run"),
        ("python own.py --dry-run --nodes 2 --partition x", "--partition"),
        ("python own.py --dry-run --nodes 2", None),
        ("python hidden.py --nodes 2", None),
        ("python missing.py --nodes 2", None),
        ("python t.py --lr 2", None),
        ("python -m t --nodes 2", None),
        ("bash run.sbatch --nodes 2", None),
    ],
)
def test_an_option_after_the_script_may_be_its_own(
    line: str, options: str | None, submission: Callable[..., Submission]
) -> None:
    found = [*script_options.options_of_hpcrun(submission(line))]
    assert [one.text.partition(" after `--`")[0] for one in found] == ([options] if options else [])


def test_options_beside_a_key_and_short_limits_are_found(
    submission: Callable[..., Submission],
) -> None:
    asked = submission(partition="a", sbatch_args=["-pb", "--mem=4G", "--time-min=1"], mem="4G")
    (twice,) = slurm_options.given_twice(asked)
    assert twice.text == "'-pb' replaces job.partition=a; give only one of them: --partition b"
    (short,) = slurm_options.shortest_time(asked)
    assert short.refused
    assert "60 s, which is not longer than job.signal_lead (90 s)" in short.text
    assert [*slurm_options.shortest_time(submission(sbatch_args=["--time-min=1:00:00"]))] == []


def test_variables_that_srun_reads_as_options_are_refused(
    submission: Callable[..., Submission],
) -> None:
    asked = {"SLURM_NTASKS": "1", "SLURM_TIMELIMIT": "5", "SLURM_WAIT": "0", "SLURM_CPU_BIND": "no"}
    found = [*slurm_options.variables_of_srun(submission(env={**asked, "NCCL_DEBUG": "INFO"}))]
    assert [(one.key, one.refused) for one in found] == [
        ("job.env.SLURM_NTASKS", True),
        ("job.env.SLURM_TIMELIMIT", True),
    ]
    assert found[1].text.endswith("use --time")


def test_all_refusals_come_together_with_their_places(
    submission: Callable[..., Submission], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = submission("srun python t.py", sbatch_args=["-n1", "--no-requeue"], srun_args=["-K0"])
    with pytest.raises(ConfigError) as told:
        check_submission(asked, lambda key: f"gpt.yaml:{len(key)}")
    assert [line.partition(": hpcrun")[0][:38] for line in told.value.lines] == [
        "gpt.yaml:17: job.sbatch_args.0: '-n1'",
        "gpt.yaml:15: job.srun_args.0: '-K0': t",
        "gpt.yaml:7: srun python t.py",
    ]
    assert "hpcrun: job.sbatch_args.1: '--no-requeue'" in capsys.readouterr().err
    # A run that was submitted like this before is not refused.
    check_submission(asked, lambda _: "", resumed=True)
    assert capsys.readouterr().err.count("hpcrun: ") >= 4


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        ("$SCRATCH/data", "the name of a variable"),
        ("/a:${MY_LIB}/b", "the name of a variable"),
        ("~/data", "a tilde"),
        *[(text, "") for text in ("/a/b~", "a$b", "pa$$WORD", "$ORIGIN/../lib", "US$100", "{x}")],
    ],
)
def test_a_value_that_only_a_shell_expands_gets_a_line(
    value: str, shown: str, submission: Callable[..., Submission]
) -> None:
    found = [*shell_text.unexpanded_values(submission("python t.py", env={"DATA": value}))]
    assert [(one.key, one.text.partition(" in its")[0]) for one in found] == (
        [("job.env.DATA", f"has {shown}")] if shown else []
    )
    assert all(value not in one.text for one in found)


def test_a_shell_script_with_windows_lines_gets_a_line(
    submission: Callable[..., Submission],
) -> None:
    asked = submission("bash dos.sh")
    (asked.folder / "dos.sh").write_bytes(b"ls\r\n")
    (found,) = shell_text.carriage_returns(asked)
    assert "sed -i 's/\\r$//' dos.sh" in found.text
    for line in ("bash run.sbatch", "python t.py", "bash -c ls", ""):
        assert [*shell_text.carriage_returns(submission(line))] == []


def test_a_submission_with_everything_gets_every_check(
    submission: Callable[..., Submission],
) -> None:
    modules = (launchers, script_options, shell_text, slurm_options, interpreter, limits)
    written = [
        function
        for module in modules
        for function in vars(module).values()
        if getattr(function, "__module__", "") == module.__name__
        and getattr(function, "__annotations__", {}).get("return") == Iterator[Concern]
        and not function.__name__.startswith("_")
    ]
    full = submission("python t.py", env={"A": "1"}, time="1:00:00")
    assert {*checks_for(full)} == {*written}
    # A plain request imports none of them.
    assert [*checks_for(submission())] == []
