"""The error of this package."""

from hpcrun.errors import UserError


class ResultsError(UserError):
    """A file, an option or a table that the results cannot use; the text has the reason."""
