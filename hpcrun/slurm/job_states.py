"""Slurm's job states, sorted by their meaning for a run. An unknown state counts as live."""

WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
    | {"RESV_DEL_HOLD", "REVOKED"}
)
_OVER = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
    | {"BOOT_FAIL", "DEADLINE"}
)


def is_over(state: str) -> bool:
    """Return True if a job in ``state`` no longer runs and does not wait for a start.

    A newer Slurm may have states that this table lacks, and a run with a job that might be live must stay
    unchanged.
    """
    return state in _OVER
