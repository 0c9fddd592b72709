"""Jobs that wait for another job, and the batch scripts of jobs, as squeue lists them."""

import re
from dataclasses import dataclass

_CONDITION = re.compile(r"(?P<kind>[a-z]+):(?P<job>[0-9_+*]+)(?:\([a-z]+\))?")


@dataclass(frozen=True)
class Dependent:
    """A pending job: its dependency in Slurm's words, and the path of its batch script."""

    job: str
    dependency: str
    script: str

    def waits_for(self, kind: str, job: str) -> bool:
        """Return True if the job waits for ``job`` under the condition ``kind``, such as ``afterok``."""
        found = _CONDITION.finditer(self.dependency)
        return any((one["kind"], one["job"]) == (kind, job) for one in found)

    def retargeted(self, kind: str, old: str, new: str) -> str:
        """Return the dependency with ``old`` replaced by ``new``, in the form that sbatch accepts."""

        def replaced(one: "re.Match[str]") -> str:
            job = new if (one["kind"], one["job"]) == (kind, old) else one["job"]
            return f"{one['kind']}:{job}"

        return _CONDITION.sub(replaced, self.dependency)


def parse_dependents(text: str) -> list[Dependent]:
    """Return the jobs for which squeue prints a dependency; lines of another format are ignored."""
    lines = (line.strip().split("|", 2) for line in text.splitlines())
    # squeue shows the waiting tasks of an array in one line, as 123_[0-5]; scontrol takes the array's number.
    return [
        Dependent(fields[0].partition("_[")[0], *fields[1:])
        for fields in lines
        if len(fields) == 3 and ":" in fields[1]
    ]


def parse_scripts(text: str) -> list[tuple[str, str, str | None]]:
    """Return id, path of the batch script, and cluster of each job; the cluster only if squeue names it.

    An array has several lines in squeue and one entry here.
    """
    found: dict[tuple[str, str, str | None], None] = {}
    cluster = None
    for line in text.splitlines():
        job, bar, script = line.strip().partition("|")
        if bar and job.isdecimal():
            found[job, script, cluster] = None
        elif job.startswith("CLUSTER: "):
            cluster = job.removeprefix("CLUSTER: ").strip()
    return list(found)
