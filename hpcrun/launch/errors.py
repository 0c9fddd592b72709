"""The error of a launch that is refused."""

from hpcrun.errors import UserError


class LaunchError(UserError):
    """A job that cannot be launched, found or signalled; the text gives the reason and the remedy."""


class SubmissionUnanswered(LaunchError):
    """sbatch got no answer: the job may exist or not."""
