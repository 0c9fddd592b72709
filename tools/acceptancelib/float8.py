"""Layers in fp8 through torchao: some steps, against the same steps in bf16."""

from importlib.util import find_spec
from typing import Any

from acceptancelib.outcome import REPORT, Job, Outcome, needs_gpu
from acceptancelib.small_runs import build, config_of, ranks
from acceptancelib.world import Member, device_of, run_ranks
from hpcrun.devices import vendor

CLOSE = 2e-2
"""Maximum relative distance between the losses in fp8 and in bf16."""

_STEPS = 4


def check(job: Job) -> list[Outcome]:
    """Compare the losses; a simulation rounds to fp8 and multiplies in fp32."""
    if find_spec("torchao") is None:
        return [needs_gpu("fp8", 'the package torchao: pip install "hpcrun[float8]"')]
    if not job.simulated and not vendor.has_float8(device_of(job)):
        return [needs_gpu("fp8", "a GPU with fp8 (compute capability 8.9, or MI300)")]
    return [judge(run_ranks(job), _setting(job))]


def judge(found: list[dict[str, Any]], setting: str) -> Outcome:
    """Return the outcome from the losses of the ranks."""
    details = {"ranks": found}
    pairs = [pair for it in found for pair in zip(it["float8"], it["bf16"], strict=True)]
    furthest = max(abs(a / b - 1) for a, b in pairs)
    line = f"{ranks(found)}, {setting}: losses within {furthest:.1e} of bf16"
    remedy = "do not use train.float8 here; " + REPORT
    if not all(abs(a / b - 1) < CLOSE for a, b in pairs):  # not `>=`, which is false for NaN
        return Outcome("fp8", "fail", line, remedy, details)
    if not furthest:
        return Outcome("fp8", "fail", f"{line}: no layer computed in fp8", remedy, details)
    return Outcome("fp8", "pass", line, details=details)


def rank(here: Member) -> dict[str, Any]:
    """Return the losses of some steps in fp8 and in bf16."""
    return {
        name: build(here, config_of(here.job, "amp.dtype=bf16", *changes)).steps(_STEPS)
        for name, changes in (("float8", [_setting(here.job)]), ("bf16", []))
    }


def _setting(job: Job) -> str:
    return f"train.float8={'emulate' if job.simulated else 'true'}"
