"""The error texts of Slurm's programs, sorted by what the caller can do about each."""

from typing import Literal

from hpcrun.cluster.slurm.programs import Completed

RequeueError = Literal["denied", "disabled", "batch-only", "pending", "transient", "unknown"]

_REQUEUE_ERRORS: tuple[tuple[str, RequeueError], ...] = (
    ("access/permission denied", "denied"),
    ("requested operation is presently disabled", "disabled"),
    ("only batch jobs are accepted", "batch-only"),
    ("job is pending execution", "pending"),
    ("unable to contact slurm controller", "transient"),
    # What scontrol requeue says when no controller answers (seen with Slurm 22.05).
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
    """Say what a failed ``scontrol requeue`` means, from its error text (slurm_errno.c).

    "pending": it has been requeued already, which is success. "transient": ask again. "denied",
    "disabled" (submitted with --no-requeue) and "batch-only" (under salloc): asking again is
    useless.
    """
    text = stderr.lower()
    return next((kind for phrase, kind in _REQUEUE_ERRORS if phrase in text), "unknown")


def is_unknown_job(answer: Completed) -> bool:
    """Return whether the controller has forgotten the job; any other failure gives False."""
    return answer.returncode != 0 and "Invalid job id specified" in answer.stderr
