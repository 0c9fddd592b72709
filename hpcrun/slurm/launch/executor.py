"""The submitit executor for Slurm, with this package's batch script instead of submitit's.

submitit creates the job folders and calls sbatch. Its script lacks ``--requeue``, sends a workload key that
many sites refuse, and ends with srun, so no process remains to find the cause of a failure. Its
pickle is written but never read: the batch step starts the ranks.
"""

import contextlib
import io
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from submitit import Job
from submitit.core.utils import FailedSubmissionError
from submitit.slurm.slurm import SlurmExecutor

from hpcrun import slurm
from hpcrun.errors import ClusterError
from hpcrun.run.trust import fixed_script
from hpcrun.slurm.environment import scrub
from hpcrun.slurm.launch.batch_script import BatchRequest, batch_script


class RequeueingSlurmExecutor(SlurmExecutor):
    """Sends ``request``'s script to sbatch.

    ``accepted``: the job's id from the moment when sbatch has printed it, even if a later step fails.
    ``script``: the file of the newest submission, by which squeue shows the job.
    """

    def __init__(self, folder: Path, request: BatchRequest) -> None:
        super().__init__(folder)
        self._request = request
        self.accepted: str | None = None
        self.script = folder
        self._kept: BinaryIO | None = None
        self.update_parameters(
            nodes=request.job.max_nodes + request.job.spares,
            ntasks_per_node=request.job.tasks_on_node,
        )

    def _make_submission_file_text(self, command: str, uid: str) -> str:
        return batch_script(self._request)

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        self.script = submission_file_path
        text = batch_script(self._request).encode()
        script, self._kept = fixed_script(submission_file_path, text)
        return sbatch_command(script, dict(os.environ))

    def _submit_command(self, command: str) -> Job[Any]:
        # submitit prints sbatch's message in addition to raising it.
        with _unheard(), contextlib.redirect_stderr(io.StringIO()):
            return super()._submit_command(command)

    def _get_job_id_from_submission_command(  # type: ignore[override]
        self, string: bytes | str
    ) -> str:
        text = string if isinstance(string, str) else string.decode(errors="replace")
        try:
            self.accepted = slurm.parse_sbatch(text)
        except ClusterError as error:
            raise FailedSubmissionError(str(error)) from error
        return self.accepted


@contextmanager
def _unheard() -> Iterator[None]:
    """Block the signals with which people and terminals end programs until the block is over.

    A terminal sends these signals to sbatch as well, which inherits the mask: if sbatch died after it
    sent its request, the job's id would be lost.
    """
    before = signal.pthread_sigmask(
        signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}
    )
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def sbatch_command(script: Path, environ: dict[str, str]) -> list[str]:
    """Return the sbatch call, without the variables that a submission from inside a job would inherit.

    An inherited SLURM_CPU_BIND would silently change the new job. SBATCH_PARTITION would override the
    script's own option; the config has already read it as the user's default.
    """
    inherited = sorted(environ.keys() - scrub(environ).keys())
    unset = [argument for name in inherited for argument in ("-u", name)]
    return ["env", *unset, "sbatch", str(script)] if unset else ["sbatch", str(script)]
