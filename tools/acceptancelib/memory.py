"""The peak of a rank's device memory in real steps, against the figure of ``hpcrun estimate``."""

import contextlib
import os

from acceptancelib.outcome import REPORT, Job, Outcome
from acceptancelib.small_runs import build, config_of, ranks
from acceptancelib.world import Member, device_of, run_ranks
from hpcrun.config import Config
from hpcrun.devices import accelerator, vendor
from hpcrun.estimate.live_storages import LiveStorages
from hpcrun.estimate.result import estimate

CLOSE = 0.15
"""Distance of the measured peak from the estimate, as a fraction of the estimate, that is a warning."""

_STEPS = 3


def check(job: Job) -> list[Outcome]:
    """Compare the highest peak of all ranks with the estimate for the same config."""
    # The fake run packs the task's small corpus into the cache.
    os.environ["XDG_CACHE_HOME"] = job.folder
    told = estimate(_config(job), 1 << 40)
    peaks = run_ranks(job)
    return [judge(told["peak"], peaks, told["parallel"], by_tensors=job.simulated)]


def judge(told: int, peaks: list[int], parallel: str, *, by_tensors: bool = False) -> Outcome:
    """Return the outcome from the estimated bytes and the measured bytes of each rank.

    ``by_tensors``: the measured bytes are a sum of living tensors, not statistics of a device.
    """
    highest = max(peaks)
    away = highest / told - 1
    line = f"{ranks(peaks)} ({parallel}): the peak is {highest / 1e6:.1f} MB"
    line += f"{' of living tensors' if by_tensors else ''}, {away:+.1%} from the estimate of "
    line += f"{told / 1e6:.1f} MB"
    details = {"estimated": told, "measured": peaks}
    if highest <= 0:
        return Outcome("estimate", "fail", "the device reports no peak of memory", REPORT, details)
    if abs(away) > CLOSE:
        remedy = (
            f"leave {away:.0%} more memory free than hpcrun estimate says; " if away > 0 else ""
        )
        return Outcome("estimate", "warn", line, remedy + REPORT, details)
    return Outcome("estimate", "pass", line, details=details)


def rank(here: Member) -> int:
    """Return the highest bytes of tensors on the device during some steps."""
    live = LiveStorages() if here.job.simulated else None
    with contextlib.nullcontext() if live is None else live:
        run = build(here, _config(here.job))
        run.steps(_STEPS)
    return accelerator.peak_memory(here.device) if live is None else live.peak


def _config(job: Job) -> Config:
    """Return a config whose tensors need far more than the workspaces of a GPU's libraries."""
    if job.simulated:
        # LiveStorages also counts the recording of a deferred build, which has no memory.
        return config_of(job, "model.width=256", "fsdp.deferred_init=false")
    bf16 = vendor.has_bf16(device_of(job))
    return config_of(
        job, "model.layers=12", "model.width=1536", "model.heads=12", "model.context=512",
        f"amp.dtype={'bf16' if bf16 else 'fp32'}",
    )  # fmt: skip
