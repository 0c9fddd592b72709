"""The errors of `hpcrun plot` and `hpcrun report`."""

from hpcrun.errors import UserError


class ReportError(UserError):
    """A figure or report cannot be made; the text has the reason and the remedy."""


def require_matplotlib() -> None:
    """Raise ReportError if matplotlib is missing.

    Raises:
        ReportError: with the command that installs matplotlib.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise ReportError(
            "matplotlib is not installed, and figures need it: `pip install matplotlib`"
        ) from error
