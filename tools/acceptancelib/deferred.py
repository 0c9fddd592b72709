"""Deferred initialization: a model whose weights are computed after sharding, against a normal build."""

from typing import Any

from acceptancelib.outcome import REPORT, Job, Outcome, needs_gpu
from acceptancelib.small_runs import build, config_of
from acceptancelib.world import Member, run_ranks


def check(job: Job) -> list[Outcome]:
    """Compare the weights after the build and after two steps; one rank never defers a build."""
    if job.ranks == 1:
        return [needs_gpu("deferred build", "two GPUs: a single rank builds the complete model")]
    return [judge(run_ranks(job))]


def judge(found: list[dict[str, Any]]) -> Outcome:
    """Return the outcome from the results of the ranks."""
    wrong = []
    for rank, figures in enumerate(found):
        normal, deferred = figures["normal"], figures["deferred"]
        if normal["deferred"] or not deferred["deferred"]:
            wrong.append(f"rank {rank} deferred {deferred['deferred']} parameters")
        for moment in ("built", "trained", "losses"):
            if normal[moment] != deferred[moment]:
                wrong.append(f"rank {rank}: a deferred build has other bits ({moment})")
    if wrong:
        remedy = "set fsdp.deferred_init=false; " + REPORT
        return Outcome("deferred build", "fail", "; ".join(wrong), remedy, {"ranks": found})
    count = found[0]["deferred"]["deferred"]
    line = f"{len(found)} ranks, {count} parameters: a deferred build has the bits of a normal build, also "
    return Outcome("deferred build", "pass", f"{line}after two steps", details={"ranks": found})


def rank(here: Member) -> dict[str, Any]:
    """Build the model both ways, and take two steps with each."""
    return {
        way: _figures(here, f"fsdp.deferred_init={wanted}")
        for way, wanted in (("normal", "false"), ("deferred", "true"))
    }


def _figures(here: Member, setting: str) -> dict[str, Any]:
    run = build(here, config_of(here.job, setting))
    built = run.bits()
    losses = run.steps(2)
    return {"deferred": run.deferred, "built": built, "losses": losses, "trained": run.bits()}
