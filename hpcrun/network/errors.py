"""The error of this package."""

from hpcrun.errors import UserError


class NetworkError(UserError):
    """A file, a setting or a node that the network tools cannot use; the text has the reason."""
