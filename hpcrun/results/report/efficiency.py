"""Requested and used resources, and the next request if the evidence allows one.

A value without a measurement is None. No value is estimated from another run or resource.
"""

from __future__ import annotations

import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from hpcrun import slurm
from hpcrun.config.fields import time_seconds
from hpcrun.results.report.runs import ReportedRun, number
from hpcrun.slurm import AttemptUsage

GIB = 1 << 30
_MARGIN = 1.25
"""Reserve of a suggested request above the highest use."""
_WASTE, _TIGHT = 0.5, 0.9
"""A use below the first share of the request is waste; a use above the second leaves no reserve."""
_WAITING = 0.2
"""A share of a step's time spent on waiting for data that is worth more loader workers."""
_IDLE_GPU = 50.0
_JOBS_IN_A_QUERY = 200
_PATIENCE = 30.0
_MEMORY = re.compile(r"(\d+(?:\.\d+)?)([KMGT]?)B?", re.IGNORECASE)
_FACTORS = {"": 1 << 20, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_CLOCKS = 600.0
"""Seconds between the clocks of hosts, at most."""
_SHORT_RUN = 60.0
"""Seconds: a shorter attempt is mostly start-up, and its use does not predict the next run."""


@dataclass(frozen=True)
class Efficiency:
    """One run's request and use. None: unknown.

    Args:
        gpus: requested, over all nodes; 0: a run on CPUs.
        gpu_busy: mean utilization in percent, as logged from NVML.
        mfu: share of the GPUs' peak arithmetic (0 to 1).
        gpu_memory: highest memory in use on one GPU, else of tensors, in bytes.
        cpus, cpus_used: requested CPUs, and used CPUs (CPU time divided by wall time), over all nodes.
        memory, memory_used: bytes per node; the use is an upper bound where ``bound`` is true.
        time_limit, longest: seconds: the limit, and the longest attempt.
        data_share: share of a step's time spent on waiting for data (0 to 1).
        advice: the next request; each a sentence with its evidence.
        accounted: sacct knows the run.
    """

    run: ReportedRun
    gpus: int | None = None
    gpu_busy: float | None = None
    mfu: float | None = None
    gpu_memory: float | None = None
    cpus: int | None = None
    cpus_used: float | None = None
    memory: float | None = None
    memory_used: float | None = None
    bound: bool = False
    time_limit: float | None = None
    longest: float | None = None
    data_share: float | None = None
    advice: Sequence[str] = ()
    accounted: bool = False


def efficiency(run: ReportedRun, usage: Mapping[str, Sequence[AttemptUsage]]) -> Efficiency:
    """Return the request, the use and the advice of one run.

    Args:
        usage: sacct's records by job id.
    """
    records = [one for job in jobs_of(run) for one in usage.get(job, ()) if _is_of(one, run)]
    gpus = _gpus(run, records)
    on_cpu = gpus == 0
    ranks = number(run.config.get("job.gpus")) or 1
    peak = _highest(run, "memory_gb")
    asked, used, bound = _memory(run, records, peak if on_cpu else None, ranks)
    cpus, cpus_used = _cpus(run, records)
    used_on_gpu = _highest(run, "gpu_memory_gb") or peak
    wait, step = run.median("data_wait"), run.median("step_time")
    limits = [one.time_limit for one in records if one.time_limit is not None]
    found = Efficiency(
        run=run,
        gpus=gpus,
        gpu_busy=_mean(run, "gpu_utilization", "gpu_util"),
        mfu=run.median("mfu"),
        gpu_memory=None if on_cpu or gpus is None or used_on_gpu is None else used_on_gpu * 1e9,
        cpus=cpus,
        cpus_used=cpus_used,
        memory=asked,
        memory_used=used,
        bound=bound,
        time_limit=max(limits, default=_limit(run.config.get("job.time"))),
        longest=_longest(run),
        data_share=wait / step if wait is not None and step else None,
        accounted=bool(records),
    )
    return replace(found, advice=tuple(_advice(found)))


def jobs_of(run: ReportedRun) -> list[str]:
    """Return the ids of the Slurm jobs of a run, each once."""
    if run.executor != "slurm":
        return []
    jobs = (event.attempt.job for event in run.events if event.attempt)
    return [job for job in dict.fromkeys(jobs) if re.fullmatch(r"\d+(_\d+)?", job)]


def ask_sacct(runs: Iterable[ReportedRun]) -> tuple[dict[str, list[AttemptUsage]], str]:
    """Return sacct's records by job id, and the reason if sacct gave none (else empty)."""
    jobs = list(dict.fromkeys(job for run in runs for job in jobs_of(run)))
    if not jobs:
        return {}, ""
    if shutil.which("sacct") is None:
        return {}, "sacct is not on this machine"
    found: dict[str, list[AttemptUsage]] = {}
    for at in range(0, len(jobs), _JOBS_IN_A_QUERY):
        command = slurm.sacct_usage_command(jobs[at : at + _JOBS_IN_A_QUERY])
        answer = slurm.run(command, timeout=_PATIENCE)
        if answer.returncode:
            words = " ".join(answer.stderr.split())[:200]
            return found, f"sacct failed: {words or answer.returncode}"
        for one in slurm.parse_sacct_usage(answer.stdout):
            found.setdefault(one.job_id, []).append(one)
    return found, ""


def memory_bytes(text: object) -> float | None:
    """Return the bytes of a request such as ``64G``; Slurm's unit without a letter is MiB.

    None also for 0, which requests all memory of a node.
    """
    found = _MEMORY.fullmatch(str(text).strip()) if text is not None else None
    return float(found[1]) * _FACTORS[found[2].upper()] or None if found else None


def _is_of(record: AttemptUsage, run: ReportedRun) -> bool:
    """Return whether the job ran when the run did: another cluster has other jobs with the same ids."""
    times = [event.time for event in run.events]
    if record.start is None:
        return True
    return min(times) - _CLOCKS <= record.start <= max(times) + _CLOCKS


def _gpus(run: ReportedRun, records: Sequence[AttemptUsage]) -> int | None:
    if run.config.get("job.cpu") is True:
        return 0
    known = [one.gpus for one in records if one.gpus is not None]
    if known:
        return max(known)
    nodes, each = _nodes(run), number(run.config.get("job.gpus"))
    # A run on this machine uses the GPUs that exist, and a site may allocate whole nodes.
    asks = run.executor == "slurm" and run.config.get("job.gpu_request") != "none"
    return int(nodes * each) if asks and nodes is not None and each is not None else None


def _nodes(run: ReportedRun) -> float | None:
    """Return the requested nodes; with a range, the largest number that an attempt had."""
    given = [event.fields.get("nodes") for event in run.events if event.what == "opened"]
    counts = [float(count) for count in given if isinstance(count, int)]
    return number(run.config.get("job.nodes")) or max(counts, default=None)


def _cpus(run: ReportedRun, records: Sequence[AttemptUsage]) -> tuple[int | None, float | None]:
    known = [one for one in records if one.cpus is not None]
    timed = [one for one in known if one.cpu_seconds is not None and one.elapsed >= _SHORT_RUN]
    used = max((one.cpu_seconds / one.elapsed for one in timed if one.cpu_seconds), default=None)
    if known:
        return max(one.cpus for one in known if one.cpus is not None), used
    each = number(run.config.get("job.cpus_per_task"))
    nodes, ranks = _nodes(run), number(run.config.get("job.gpus"))
    tasks = number(run.config.get("job.tasks_per_node"))
    if each is None or nodes is None or ranks is None:
        return None, used
    return int(each * nodes * (tasks or ranks)), used


def _memory(
    run: ReportedRun, records: Sequence[AttemptUsage], peak_gb: float | None, ranks: float
) -> tuple[float | None, float | None, bool]:
    """Return the memory requested and used per node, in bytes, and whether the use is an upper bound."""
    requests = [one.memory_asked / one.nodes for one in records if one.memory_asked and one.nodes]
    uses = [one.memory_used / one.nodes for one in records if one.memory_used and one.nodes]
    asked, used = max(requests, default=None), max(uses, default=None)
    if asked is None:
        asked = memory_bytes(run.config.get("job.mem"))
    if used is not None:
        return asked, used, True
    if peak_gb is not None:
        # The log has the memory of the largest rank, without its loader processes.
        return asked, peak_gb * 1e9 * ranks, ranks > 1
    return asked, None, False


def _limit(asked: object) -> float | None:
    try:
        return float(time_seconds(asked)) if isinstance(asked, str) else None
    except ValueError:
        # The config of another program.
        return None


def _longest(run: ReportedRun) -> float | None:
    """Return the seconds of the longest attempt that ended."""
    opened: dict[object, float] = {}
    found: list[float] = []
    for event in run.events:
        if event.what == "opened":
            opened[event.attempt] = event.time
        elif event.what == "ended" and event.attempt in opened:
            # The end of an attempt that died is recorded later.
            last = number(event.fields.get("last_seen")) or event.time
            found.append(last - opened[event.attempt])
    return max(found, default=None)


def _highest(run: ReportedRun, metric: str) -> float | None:
    return max(run.series(metric)[1].tolist(), default=None)


def _mean(run: ReportedRun, *metrics: str) -> float | None:
    known = [values for values in (run.series(metric)[1] for metric in metrics) if len(values)]
    return float(known[0].mean()) if known else None


def _advice(found: Efficiency) -> Iterable[str]:
    """Yield the changes of the next request that the run's use supports."""
    if found.run.state != "finished":
        # A run that ended early may not have met its largest batch, validation or save.
        return
    ended = [event.cause for event in found.run.events if event.what == "ended"]
    limit, longest = found.time_limit, found.longest
    if limit and longest and len(ended) == 1 and _SHORT_RUN <= longest < _WASTE * limit:
        minutes = max(1, math.ceil(longest * _MARGIN / 60))
        yield f"job.time={minutes // 60:02d}:{minutes % 60:02d}:00 (took {longest / 60:.0f} min)"
    asked, used = found.memory, found.memory_used
    if asked and used:
        request = max(1, math.ceil(used * _MARGIN / GIB))
        wasted = used < _WASTE * asked and request * GIB < asked and found.accounted
        if used > _TIGHT * asked or wasted:
            yield f"job.mem={request}G (used {used / asked:.0%} of the request)"
    yield from _cpu_advice(found)
    share = found.data_share
    if share is not None and share > _WAITING:
        yield f"more data.workers (steps wait {share:.0%} of their time for data)"
    if found.gpu_busy is not None and found.gpu_busy < _IDLE_GPU and found.gpus and found.gpus > 1:
        yield f"fewer GPUs, or larger batches (GPUs busy {found.gpu_busy:.0f} %)"


def _cpu_advice(found: Efficiency) -> Iterable[str]:
    asked, used = found.cpus, found.cpus_used
    if asked is None or used is None or used >= _WASTE * asked:
        return
    if found.data_share is not None and found.data_share > _WAITING:
        return
    tasks = max(1, round(asked / (number(found.run.config.get("job.cpus_per_task")) or asked)))
    request = max(1, math.ceil(used * _MARGIN / tasks))
    if request * tasks < asked:
        yield f"job.cpus_per_task={request} (used {used:.1f} of {asked} CPUs)"
