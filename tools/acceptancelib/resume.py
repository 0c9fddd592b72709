"""An interrupted run and an undisturbed run, compared bit by bit at the end."""

import hashlib
import time
from collections.abc import Iterator
from typing import Any

import torch

from acceptancelib.outcome import REPORT, Job, Outcome
from acceptancelib.runs import submit, wait_for_end
from hpcrun.checkpoint.sharded.rank_file import StoreReader
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.journal import Journal
from hpcrun.storage.store import CheckpointStore

_EXPECTED = {"calm": ["finished"], "interrupted": ["preemption", "crash", "finished"]}
_SHOWN = 50
"""Values that differ, in the JSON file."""


def check(job: Job) -> list[Outcome]:
    """Run both with train.deterministic=true: no interruption; a warning signal, then a killed rank."""
    late = time.monotonic() + 0.95 * job.seconds
    found: dict[str, Any] = {}
    for name, plan in (("calm", {}), ("interrupted", {"model__warn_at": 7, "model__kill_at": 14})):
        run = submit(job, name, "--detach", train__deterministic=True, **plan)
        wait_for_end(job, run, max(1.0, late - time.monotonic()))
        causes = [event.cause for event in Journal(run).read().events if event.tag == "ended"]
        found[name] = {"causes": causes, "state": digests(run)}
    return [judge(found, job.ranks)]


def judge(found: dict[str, Any], ranks: int) -> Outcome:
    """Return the outcome from the causes of the ends, and the hashes of the last checkpoints."""
    for name, expected in _EXPECTED.items():
        if found[name]["causes"] != expected:
            line = f"the {name} run ended with {', '.join(map(str, found[name]['causes']))}"
            line += f" instead of {', '.join(expected)}"
            return Outcome("equal bits", "fail", line, REPORT, {"causes": found[name]["causes"]})
    calm, rough = found["calm"]["state"], found["interrupted"]["state"]
    if not calm:
        return Outcome("equal bits", "fail", "the calm run has no checkpoint", REPORT)
    other = sorted(name for name in calm.keys() | rough.keys() if calm.get(name) != rough.get(name))
    if other:
        line = (
            f"{len(other)} of {len(calm)} values differ after two interruptions, such as {other[0]}"
        )
        remedy = "interrupted runs differ in the last bits here; " + REPORT
        shown = {name: [calm.get(name), rough.get(name)] for name in other[:_SHOWN]}
        return Outcome("equal bits", "fail", line, remedy, {"values": len(calm), "other": shown})
    line = f"{ranks} ranks, a preemption and a killed rank: {len(calm)} values with the same bits"
    return Outcome("equal bits", "pass", line, details={"values": len(calm)})


def digests(run: RunDirectory) -> dict[str, str]:
    """Return the hash of every value of the newest checkpoint: weights, moments, generators, positions.

    Values instead of files: pickle writes equal plain data differently depending on shared objects.
    """
    store = CheckpointStore(run.checkpoints, "acceptance-0")
    steps = store.steps()
    if not steps:
        return {}
    store.check(steps[0])
    reader = StoreReader(store, steps[0])
    tensors = {name: reader.empty(name) for name in reader.index.tensors}
    reader.load(tensors)
    state = {name: reader.blob(name) for name in reader.index.blobs}
    return {name: hashlib.sha256(it).hexdigest() for name, it in _leaves(state | tensors, "state")}


def _leaves(value: Any, name: str) -> Iterator[tuple[str, bytes]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{name}.{key}")
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _leaves(item, f"{name}[{number}]")
    elif isinstance(value, torch.Tensor):
        yield name, value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    else:
        yield name, repr(value).encode()
