"""The Muon optimizer: the loss falls, and sharded weights train like replicated weights on all ranks."""

from importlib.util import find_spec
from typing import Any

from acceptancelib.outcome import REPORT, Job, Outcome, needs_gpu
from acceptancelib.small_runs import build, config_of, ranks
from acceptancelib.world import Member, run_ranks

CLOSE = 1e-2
"""Maximum relative distance of the losses with FSDP from those with DDP: Muon multiplies in bf16."""

_STEPS = 6
_FALL = 0.95
"""The last loss must be below this fraction of the first loss."""


def check(job: Job) -> list[Outcome]:
    """Train with DDP and with FSDP, or on the only GPU."""
    if find_spec("torch.optim._muon") is None:
        return [needs_gpu("muon", "torch 2.9 or newer")]
    return [judge(run_ranks(job))]


def judge(found: list[dict[str, Any]]) -> Outcome:
    """Return the outcome from the losses and the weights' hash of each way and rank."""
    wrong = []
    for way in found[0]:
        if len({figures[way]["bits"] for figures in found}) > 1:
            wrong.append(f"the ranks have different weights ({way})")
        for rank, figures in enumerate(found):
            losses = figures[way]["losses"]
            if not losses[-1] < _FALL * losses[0]:  # not `>=`, which is false for NaN
                wrong.append(f"rank {rank} has losses {losses} ({way})")
            pairs = zip(losses, figures[next(iter(figures))]["losses"], strict=True)
            if any(abs(a / b - 1) > CLOSE for a, b in pairs):
                wrong.append(f"rank {rank} has other losses with {way}")
    if wrong:
        return Outcome("muon", "fail", "; ".join(wrong), REPORT, {"ranks": found})
    ways = " and ".join(found[0])
    ends = " and ".join(f"{it['losses'][-1]:.3f}" for it in found[0].values())
    first = next(iter(found[0].values()))["losses"][0]
    line = f"{ranks(found)}, {ways}: losses from {first:.3f} to {ends}; same weights on all ranks"
    return Outcome("muon", "pass", line, details={"ranks": found})


def rank(here: Member) -> dict[str, Any]:
    """Return the losses and the weights' hash of each way."""
    ways = {"ddp": "ddp", "fsdp": "fsdp"} if here.job.ranks > 1 else {"single": "auto"}
    return {way: _figures(here, wanted) for way, wanted in ways.items()}


def _figures(here: Member, parallel: str) -> dict[str, Any]:
    config = config_of(here.job, "optim.name=muon", "train.lr=0.01", f"train.parallel={parallel}")
    run = build(here, config)
    return {"losses": run.steps(_STEPS), "bits": run.bits()}
