"""Error texts of Slurm's programs, sorted by the caller's possible reactions."""

from typing import Literal

from hpcrun.slurm.programs import Completed

RequeueError = Literal["denied", "disabled", "batch-only", "pending", "transient", "unknown"]

_REQUEUE_ERRORS: tuple[tuple[str, RequeueError], ...] = (
    ("access/permission denied", "denied"),
    ("requested operation is presently disabled", "disabled"),
    ("only batch jobs are accepted", "batch-only"),
    ("job is pending execution", "pending"),
    ("unable to contact slurm controller", "transient"),
    # scontrol requeue prints this when no controller answers (observed with Slurm 22.05).
    ("unexpected message received", "transient"),
    ("socket timed out", "transient"),
    ("zero bytes were transmitted", "transient"),
    ("in standby mode", "transient"),
    ("can not be altered now, try again later", "transient"),
    ("protocol authentication error", "transient"),
    ("connection refused", "transient"),
    ("timed out after", "transient"),
)


def classify_requeue_error(stderr: str) -> RequeueError:
    """Classify a failed ``scontrol requeue`` by its error text (slurm_errno.c).

    "pending": the job has been requeued already, which is success. "transient": try again. "denied",
    "disabled" (submitted with --no-requeue) and "batch-only" (under salloc): another try is
    useless.
    """
    text = stderr.lower()
    return next((kind for phrase, kind in _REQUEUE_ERRORS if phrase in text), "unknown")


def is_unknown_job(answer: Completed) -> bool:
    """Return True if the controller has forgotten the job; any other failure gives False."""
    return answer.returncode != 0 and "Invalid job id specified" in answer.stderr
