"""What a launch refuses with."""

from hpcrun.errors import UserError


class LaunchError(UserError):
    """A job that cannot be launched, found or signalled; the text says why and what to do."""
