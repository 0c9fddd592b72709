"""Number of CPU threads for a rank, so that the ranks of a node do not compete for cores.

torchrun sets OMP_NUM_THREADS=1 and srun sets nothing: without a limit, each rank starts as
many threads as the node has cores.
"""

from collections.abc import Mapping

from hpcrun.errors import ClusterError


def threads_per_rank(environ: Mapping[str, str], cpus: int, ranks: int = 1) -> int:
    """Return the threads of each of ``ranks`` ranks in a task that has ``cpus`` CPUs to itself.

    OMP_NUM_THREADS decides if it is set (its first number: OpenMP allows one per nesting
    level), then SLURM_CPUS_PER_TASK, then ``cpus``.

    Raises:
        ClusterError: the value of a variable is not a positive number.
    """
    asked = environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if asked:
        return _positive("OMP_NUM_THREADS", asked)
    given = environ.get("SLURM_CPUS_PER_TASK", "").strip()
    if given:
        cpus = _positive("SLURM_CPUS_PER_TASK", given)
    return max(1, cpus // ranks)


def _positive(name: str, text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ClusterError(f"{name} is {text!r}: expected a positive number; correct or unset it")
    return int(text)
