"""Start again in the same job after a first crash, however early: ``restarts.strategies: [once-more]``."""

from hpcrun.ports import AttemptEnd, Start


def once_more(end: AttemptEnd) -> Start | None:
    """Choose a new step after one crash; leave the choice to hpcrun after two in a row."""
    causes = [record.cause.value for record in end.state.attempts if record.cause]
    if causes[-1:] == ["crash"] and causes[-2:] != ["crash", "crash"]:
        return Start("step", "a first crash")
    return None
