"""Errors that end a training; imports no torch, because ranks may fail before torch is loaded."""

from hpcrun.errors import UserError


class PlannedStop(RuntimeError):
    """Intended stop with a complete message; printed without a traceback."""


class NotTrainable(UserError, PlannedStop):
    """The task's model or loss cannot be trained; any single rank may find this at any step."""

    certain = True


class NotDeterministic(NotTrainable):
    """A kernel is not deterministic, which train.deterministic forbids."""


class NotSameBits(NotTrainable):
    """A resume would change the last bits, which train.deterministic=strict forbids."""


# Missing or closed files, missing names, and code that Python cannot read.
_TO_CORRECT = (
    *(FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError),
    *(ImportError, SyntaxError, NameError),
)
_OF_A_NODE = ("/dev/", "/proc/", "/sys/")
_OF_A_DRIVER = ("shared object", "undefined symbol", "GLIBC", "CUDA", "libcu")


def is_mistake(error: BaseException) -> bool:
    """Return True if ``error``, raised before the first step, would occur at every other start too.

    Errors of a node, such as those of its devices and its driver's libraries, do not count.
    """
    if isinstance(error, OSError) and str(error.filename).startswith(_OF_A_NODE):
        return False
    if isinstance(error, ImportError) and any(word in str(error) for word in _OF_A_DRIVER):
        return False
    return isinstance(error, _TO_CORRECT)
