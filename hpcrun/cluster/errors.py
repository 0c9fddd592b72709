"""Errors of this package: the environment or the scheduler's answer cannot be used."""

from hpcrun.errors import UserError


class ClusterError(UserError):
    """The environment, or an answer of the scheduler, cannot be used; one line gives the reason."""


class NodeUnfit(ClusterError):
    """A node lacks what the job needs, and another node may have it."""
