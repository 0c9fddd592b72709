"""The refusal of this room: what the environment or the scheduler says does not make sense."""

from hpcrun.errors import UserError


class ClusterError(UserError):
    """The environment, or an answer of the scheduler, cannot be used; one line says why."""


class NodeUnfit(ClusterError):
    """A node lacks what the job needs, and another node may have it."""
