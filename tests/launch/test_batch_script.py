"""The batch script, run by bash with stand-ins for the programs that it calls."""

import shlex
import subprocess
from pathlib import Path

import pytest

from hpcrun.config import Job
from hpcrun.launch.batch_script import BatchRequest, batch_script
from hpcrun.launch.errors import LaunchError
from hpcrun.launch.raw_script import SCRIPTS


class Desk:
    """A folder of stand-ins that note how they were called; ``answers`` are their scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        for program in ("sleep", "srun", "scontrol", "python"):
            self.answer(program, "exit 0")

    def answer(self, program: str, script: str) -> None:
        stand_in = self.bin / program
        calls = shlex.quote(str(self.calls))
        stand_in.write_text(f'#!/bin/bash\necho "{program} $*" >> {calls}\n{script}\n')
        stand_in.chmod(0o755)

    def run(self, job: Job, **environ: str) -> "subprocess.CompletedProcess[str]":
        request = BatchRequest(
            run=self.folder / "a run", job=job, python="python", worker=("work", "it's here")
        )
        return subprocess.run(
            ["bash", "-c", batch_script(request)],
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "n[1-2]",
                **environ,
            },
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def run_raw(self, *arguments: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        """The script that people submit as it is."""
        return subprocess.run(
            ["bash", SCRIPTS / "train.sbatch", *arguments],
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "PYTHON": "python",
                "SLURM_JOB_ID": "7",
                "SLURM_JOB_NODELIST": "n[1-2]",
                **environ,
            },
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def called(self, program: str) -> list[str]:
        lines = self.calls.read_text().splitlines()
        return [line for line in lines if line.split()[0] == program]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_sruns_code_reaches_the_judge_and_the_judges_code_is_the_jobs(desk: Desk) -> None:
    desk.answer("srun", "exit 137")
    desk.answer("python", "exit 3")
    assert desk.run(Job()).returncode == 3
    run = desk.folder / "a run"
    assert desk.called("python") == [f"python -m hpcrun settle {run} --exit-code 137"]
    assert desk.called("scontrol") == []
    assert (run / "logs" / "7" / "restart-0").is_dir()


def test_an_array_element_goes_by_the_name_by_which_it_is_requeued(desk: Desk) -> None:
    done = desk.run(Job(), SLURM_ARRAY_JOB_ID="5", SLURM_ARRAY_TASK_ID="2", SLURM_RESTART_COUNT="4")
    assert "hpcrun: attempt 5_2-4 on n[1-2]" in done.stdout
    assert (desk.folder / "a run" / "logs" / "5_2" / "restart-4").is_dir()


def test_a_controller_that_is_away_is_asked_again_until_it_requeues(desk: Desk) -> None:
    desk.answer("python", "exit 75")
    away = desk.folder / "away"
    away.write_text("xx")
    desk.answer(
        "scontrol",
        f"truncate -s -1 {away} 2>/dev/null && [ -s {away} ] && exit 1\n"
        '[ "$1" = show ] && echo "JobId=7 Requeue=1 Restarts=0 BatchFlag=1"\nexit 0',
    )
    assert desk.run(Job()).returncode == 75
    assert [call.split()[1] for call in desk.called("scontrol")] == ["show", "show", "requeue"]


def test_a_job_that_slurm_has_started_again_is_left_alone(desk: Desk) -> None:
    desk.answer("python", "exit 75")
    desk.answer("scontrol", 'echo "JobId=7 Requeue=1 Restarts=1 BatchFlag=1"')
    desk.run(Job())
    assert desk.called("scontrol") == ["scontrol show job 7"]


def test_a_controller_that_never_comes_back_is_given_up(desk: Desk) -> None:
    desk.answer("python", "exit 75")
    desk.answer("scontrol", "exit 1")
    assert desk.run(Job()).returncode == 75
    waited = sum(int(call.split()[1]) for call in desk.called("sleep"))
    assert 60 <= waited <= 600


def test_setup_lines_and_variables_come_before_the_ranks(desk: Desk) -> None:
    desk.answer("srun", 'echo "NCCL_IB_HCA=$NCCL_IB_HCA SITE=$SITE" >> ' + f"{desk.calls}")
    desk.run(Job(env={"NCCL_IB_HCA": "mlx5_0,mlx5_1"}, setup=["export SITE=here"]))
    assert "NCCL_IB_HCA=mlx5_0,mlx5_1 SITE=here" in desk.calls.read_text()


@pytest.mark.parametrize("setup", ["module load CUDA/12", "exit 0"])
def test_a_setup_line_that_fails_is_told_to_the_run_before_any_rank_starts(
    desk: Desk, setup: str
) -> None:
    desk.answer("python", "exit 2")
    done = desk.run(Job(setup=["export code=9 RUN=/x job=77", setup]))
    assert done.returncode == 2
    assert done.stdout.startswith("hpcrun: attempt 7-0 on n[1-2]\n")
    code = 127 if "module" in setup else 0
    run = desk.folder / "a run"
    told = f"python -m hpcrun settle {run} --exit-code {code} --setup {setup}"
    assert desk.calls.read_text().splitlines() == [told]


def test_a_raw_script_goes_by_its_own_name_in_what_another_job_has_left_it(desk: Desk) -> None:
    (desk.folder / "a run").mkdir()
    (desk.folder / "a run" / "config.yaml").touch()
    desk.answer(
        "scontrol",
        'echo "JobId=7 JobName=x Restarts=0 BatchFlag=1"; echo "   CPUs/Task=1 ReqB:S=0"',
    )
    desk.answer("srun", "env >> " + shlex.quote(str(desk.calls)))
    outer = {
        "SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "4",
        "SLURM_MEM_PER_NODE": "800", "SLURM_CPUS_PER_TASK": "3", "SLURM_CPU_BIND": "cores",
        "WORLD_SIZE": "8", "RANK": "1", "LOCAL_RANK": "1",
    }  # fmt: skip
    done = desk.run_raw("a run", **outer)
    assert done.returncode == 0, done.stderr
    assert "hpcrun: attempt 7-0 on n[1-2]" in done.stdout
    assert (desk.folder / "a run" / "logs" / "7" / "restart-0").is_dir()
    (srun,) = desk.called("srun")
    assert "--cpus-per-task" not in srun
    inherited = set(desk.calls.read_text().splitlines()) & {f"{k}={v}" for k, v in outer.items()}
    assert not inherited


def test_a_raw_script_is_an_array_element_where_slurm_says_so(desk: Desk) -> None:
    (desk.folder / "r").mkdir()
    (desk.folder / "r" / "config.yaml").touch()
    desk.answer(
        "scontrol",
        'echo "JobId=7 ArrayJobId=5 ArrayTaskId=2 JobName=x"; echo "   Restarts=4 CPUs/Task=3 X=0"',
    )
    element = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_RESTART_COUNT": "4"}
    done = desk.run_raw("r", **element, SLURM_CPUS_PER_TASK="3")
    assert "hpcrun: attempt 5_2-4 on" in done.stdout
    assert "--cpus-per-task=3" in desk.called("srun")[0]


def test_a_raw_script_without_a_run_makes_nothing(desk: Desk) -> None:
    done = desk.run_raw("runs/nix")
    assert done.returncode == 2
    assert done.stderr.startswith(
        "runs/nix: no run lies there; make one with `hpcrun submit --prep"
    )
    assert not (desk.folder / "runs").exists()


@pytest.mark.parametrize("place", ["runs%j", "%5N", "runs\\x", "a\nb"])
def test_a_path_that_slurm_or_submitit_reads_otherwise_is_refused(place: str) -> None:
    request = BatchRequest(run=Path("/x") / place, job=Job(), python="python", worker=("w",))
    with pytest.raises(LaunchError, match="a meaning of their own"):
        batch_script(request)
