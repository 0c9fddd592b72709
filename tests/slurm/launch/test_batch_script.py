"""The shell code of the batch scripts, with a substitute for the interpreter of the batch step."""

import os
import shlex
import subprocess
from pathlib import Path

import pytest

from hpcrun.config import Job
from hpcrun.errors import LaunchError
from hpcrun.slurm.launch.batch_script import STEP_LOOP, BatchRequest, batch_script
from hpcrun.slurm.launch.raw_script import SCRIPTS

SHOWN = "JobId=7 JobName=a\\n   JobState={} Reason=None\\n   Requeue=1 Restarts={} BatchFlag=1"


class Desk:
    """Return a folder of substitutes that record their calls; ``answers`` are their scripts."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run = folder, folder / "a run"
        self.run.mkdir()
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.calls = folder / "calls"
        self.calls.touch()
        self.answer("sleep", "exit 0")
        self.shows("RUNNING", 0)
        self.answer("python", f"rm {shlex.quote(str(self.run))}/.unstarted-7; exit 0")

    def answer(self, program: str, script: str) -> None:
        stand_in = self.bin / program
        calls = shlex.quote(str(self.calls))
        stand_in.write_text(f'#!/bin/bash\necho "{program} $*" >> {calls}\n{script}\n')
        stand_in.chmod(0o755)

    def shows(self, state: str, restarts: int) -> None:
        self.answer("scontrol", f"[ $1 = show ] && printf '{SHOWN.format(state, restarts)}'; true")

    def submit(self, kind: str, **environ: str) -> "subprocess.CompletedProcess[str]":
        """Run the generated script, or the script of that name in sbatch/."""
        request = BatchRequest(run=self.run, job=Job(), python="python")
        generated = ["bash", "-c", batch_script(request)]
        return subprocess.run(
            generated if kind == "generated" else ["bash", SCRIPTS / kind, "a run"],
            env={
                "PATH": f"{self.bin}:/usr/bin:/bin",
                "PYTHON": "python",
                "SLURM_JOB_ID": "7",
                "SLURMD_NODENAME": "n1",
                **environ,
            },
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )

    def called(self, program: str) -> list[str]:
        lines = self.calls.read_text().splitlines()
        return [line for line in lines if line.split()[0] == program]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


KINDS = ["generated", "train.sbatch", "train_torchrun.sbatch", "sweep_array.sbatch"]
OPTIONS = {
    "generated": "",
    "train.sbatch": " --own-script",
    "train_torchrun.sbatch": " --own-script",
    "sweep_array.sbatch": " --own-script",
}
ELEMENT = {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "0"}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("code", [0, 1, 75])
def test_a_step_is_called_once_and_gives_its_code(desk: Desk, kind: str, code: int) -> None:
    desk.answer("python", f"rm '{desk.run}/.unstarted-7'; exit {code}")
    assert desk.submit(kind, **ELEMENT).returncode == code
    assert desk.called("python") == [f"python -m hpcrun batch {desk.run}{OPTIONS[kind]}"]
    assert desk.called("scontrol") + desk.called("sleep") == []


@pytest.mark.parametrize("kind", KINDS[1:])
def test_a_script_to_copy_has_the_generated_loop(kind: str) -> None:
    job = "${SLURM_ARRAY_JOB_ID}_$element" if "array" in kind else "$SLURM_JOB_ID"
    loop = STEP_LOOP.format(step="step", unstarted="$RUN/.unstarted-", job=job)
    text = (SCRIPTS / kind).read_text()
    # A person's script names its run in a word, and the step refuses the folder of another user.
    comment = "    # The step refuses a folder of another user, which gets no file.\n"
    line = 'echo "$SLURMD_NODENAME" >> "$unstarted"'
    text = text.replace(comment, "").replace(f'if [ -O "$RUN" ]; then {line}; fi', line)
    assert text.endswith(loop.partition("\n")[2] + "\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make files of another user")
@pytest.mark.parametrize("kind", KINDS)
def test_a_folder_of_another_user_gets_no_file(desk: Desk, kind: str) -> None:
    desk.answer("python", "exit 2")
    os.chown(desk.run, 65534, -1)
    assert desk.submit(kind, **ELEMENT).returncode == 2
    assert [*desk.run.iterdir()] == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_interpreter_is_tried_again_on_another_node(desk: Desk, kind: str) -> None:
    desk.answer("python", "exit 127")
    name = "5_0" if kind == "sweep_array.sbatch" else "7"
    for start in range(3):
        desk.shows("RUNNING", start)
        restart = {"SLURM_RESTART_COUNT": str(start)} if start else {}
        assert desk.submit(kind, **ELEMENT, **restart).returncode == 127
    assert len(desk.called("python")) == 9
    requeues = [call for call in desk.called("scontrol") if "requeue" in call]
    assert requeues == [f"scontrol requeue {name}"] * 2


@pytest.mark.parametrize(("state", "restarts"), [("COMPLETING", 0), ("RUNNING", 1)])
def test_a_job_that_ends_or_was_restarted_is_not_requeued(
    desk: Desk, state: str, restarts: int
) -> None:
    desk.answer("python", "exit 127")
    desk.shows(state, restarts)
    desk.submit("generated")
    assert desk.called("scontrol") == ["scontrol show job 7"]


@pytest.mark.parametrize(
    ("kind", "state", "restarts", "starts"),
    [
        *((kind, "COMPLETING", 0, 1) for kind in KINDS),
        ("generated", "RUNNING", 1, 1),
        # A reboot of the node: Slurm would take the end of the script for the end of the job.
        *((kind, "RUNNING", 0, 3) for kind in KINDS),
    ],
)
def test_a_sigterm_ends_a_job_only_with_slurm(
    desk: Desk, kind: str, state: str, restarts: int, starts: int
) -> None:
    desk.answer("python", "kill -TERM $PPID; exit 1")
    desk.shows(state, restarts)
    assert desk.submit(kind, **ELEMENT).returncode == 1
    assert len(desk.called("python")) == starts
    assert any("requeue" in call for call in desk.called("scontrol")) is (starts > 1)


def test_a_folder_without_write_access_reaches_the_step_once(desk: Desk) -> None:
    desk.answer("python", "exit 1")
    (desk.run / ".unstarted-7").symlink_to("/nowhere/x")
    assert desk.submit("generated").returncode == 1
    assert len(desk.called("python")) == 1


@pytest.mark.parametrize(("line", "code"), [("module load CUDA/12", 127), ("exit 0", 0)])
def test_a_failed_line_of_an_own_script_is_recorded(
    desk: Desk, line: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = desk.folder / "mine"
    changed.mkdir()
    text = (SCRIPTS / "train.sbatch").read_text()
    (changed / "train.sbatch").write_text(text.replace("# srun --export=…,", f"{line}\n#"))
    monkeypatch.setitem(desk.submit.__func__.__globals__, "SCRIPTS", changed)  # type: ignore[attr-defined]
    desk.answer("python", "exit 2")
    assert desk.submit("train.sbatch").returncode == 2
    (call,) = desk.called("python")
    assert call.endswith(f"--own-script --exit-code={code} --failed={line}")


def test_an_array_with_more_elements_than_runs_says_so(desk: Desk) -> None:
    done = desk.submit("sweep_array.sbatch", SLURM_ARRAY_TASK_ID="3")
    assert (done.returncode, desk.called("python")) == (2, [])
    assert done.stderr == "element 3, but only 1 run directories\n"


@pytest.mark.parametrize("place", ["runs%j", "%5N", "runs\\x", "a\nb", "100%%"])
def test_a_path_that_slurm_or_submitit_reads_otherwise_is_refused(place: str) -> None:
    request = BatchRequest(run=Path("/x") / place, job=Job(), python="python")
    with pytest.raises(LaunchError, match="in a path by other text"):
        batch_script(request)
