"""The cluster to record, and the folder of the recordings, without paths of this machine."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpcrun import slurm as programs
from tests.on_slurm.cluster import SlurmCluster

# hpcrun's environment for Slurm's programs: times are Unix seconds.
PLAIN = {"SLURM_TIME_FORMAT": "%s", "LC_ALL": "C"}
PATIENCE = 180.0


class Site:
    """A cluster with a folder for the output of its programs.

    Attributes:
        slurm: the cluster.
        jobs: the ids of the recorded jobs by the name of their scene.
    """

    def __init__(self, slurm: SlurmCluster, folder: Path) -> None:
        self.slurm = slurm
        self.jobs: dict[str, str] = {}
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def submit(self, scene: str, *arguments: str, script: str | None = None) -> str:
        """Submit the job of ``scene`` with ``SCENE.txt`` as its log, and return its id."""
        # A second start would empty the log.
        log = (f"--output={scene}.txt", "--open-mode=append")
        job = self.slurm.sbatch(*log, f"--job-name={scene}", *arguments, script=script)
        self.jobs[scene] = job
        return job

    def ask(self, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        """Return a program's answer to the job user on the login host."""
        return self.slurm.run(command, env=PLAIN, check=False)

    def keep(self, name: str, command: Sequence[str]) -> None:
        """Record the output of a command that succeeds."""
        done = self.ask(command)
        if done.returncode != 0:
            raise AssertionError(f"{' '.join(command)}: {done.stderr}")
        self.write(name, done.stdout)

    def keep_job(self, scene: str) -> None:
        """Record ``scontrol show job`` of the scene's job."""
        self.keep(f"job-{scene}.txt", programs.scontrol_show_job_command(self.jobs[scene]))

    def keep_queue(self, name: str) -> None:
        """Record squeue for all jobs so far."""
        self.keep(name, programs.squeue_command(list(self.jobs.values())))

    def keep_log(self, scene: str) -> None:
        """Record the output of the scene's batch script, of srun and of slurmstepd."""
        self.write(f"batch-{scene}.txt", (self.slurm.shared / f"{scene}.txt").read_text())

    def keep_environment(self, name: str, text: str) -> None:
        """Record the variables of launchers and GPUs among the output of ``env``."""
        prefixes = ("SLURM", "CUDA_", "HYDRA_", "I_MPI_", "OMPI_", "PRTE_", "HIP_", "ROCR_")
        own = ("SLURM_CONF=", "SLURM_TIME_FORMAT=")
        lines = [x for x in text.splitlines() if x.startswith(prefixes) and not x.startswith(own)]
        self.write(f"{name}.env", "".join(f"{line}\n" for line in sorted(lines)))

    def keep_json(self, name: str, facts: object) -> None:
        """Record facts that the script itself collects."""
        self.write(name, json.dumps(facts, indent=1, sort_keys=True) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a recording, with the names of an ordinary cluster instead of this machine's names."""
        cluster = self.slurm.handle
        for mine, ordinary in (
            (str(cluster.layout.shared), "/home/user/run"),
            (str(cluster.layout.root), "/srv/slurm"),
            (str(Path(self.slurm.path.partition(":")[0]).parent), "/usr"),
            (cluster.spec.name, "dev"),
            (cluster.spec.user, "user"),
        ):
            # JSON writes a path with a backslash before each slash.
            for slash in ("/", r"\/"):
                text = text.replace(mine.replace("/", slash), ordinary.replace("/", slash))
        (self._folder / name).write_text(text)

    def wait(self, scene: str, *states: str) -> None:
        """Wait until the scene's job is in one of ``states``."""
        shown = programs.scontrol_show_job_command(self.jobs[scene])
        # The names and comments of some jobs look like fields.
        self.until(
            lambda: programs.parse_show_job(self.ask(shown).stdout).get("JobState") in states,
            f"{scene}: {' or '.join(states)}",
        )

    def wait_for_text(self, name: str, words: str) -> None:
        """Wait until a file of the job user contains ``words``."""
        path = self.slurm.shared / name
        self.until(lambda: path.exists() and words in path.read_text(), f"{name}: {words}")

    @staticmethod
    def until(condition: Callable[[], bool], scene: str) -> None:
        """Wait for ``condition``; raises AssertionError after three minutes."""
        late = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() > late:
                raise AssertionError(f"did not come about: {scene}")
            time.sleep(0.1)
