"""Slurm's job states, sorted by what they mean for a run. A state that is not known counts as live."""

WAITING = frozenset(
    {"PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT"}
    | {"RESV_DEL_HOLD", "REVOKED"}
)
_OVER = frozenset(
    {"COMPLETED", "CANCELLED", "FAILED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY"}
    | {"BOOT_FAIL", "DEADLINE"}
)


def is_over(state: str) -> bool:
    """Return whether a job in ``state`` runs no more, and waits for no start.

    A newer Slurm may have states that this table lacks, and a run with a job that might be live must not
    be touched.
    """
    return state in _OVER
