"""Find settings with which a training fits: the advice of the out-of-memory message, tried in fake runs."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import yaml

from hpcrun.config import Config
from hpcrun.config.resolve import contradictions
from hpcrun.errors import UserError
from hpcrun.estimate.fake_run import FakeRun
from hpcrun.estimate.result import FRAGMENTED, GIB, RESERVE_GIB, Traced, needed
from hpcrun.train.data.batching import Batching, accumulation_of
from hpcrun.train.health.out_of_memory import MemorySettings, advice

SECONDS = 60.0
"""Seconds after which the search begins no further fake run."""


@dataclass(frozen=True)
class Remedy:
    """Settings, as ``key=value``, with which the peak is that of ``traced``."""

    settings: tuple[str, ...]
    traced: Traced


def remedies(
    run: FakeRun, config: Config, memory: int, now: Traced, tell: Callable[[str], None]
) -> list[Remedy]:
    """Return the settings that fit: each advice alone, or else all advice together; empty if none fits."""
    end, found = time.monotonic() + SECONDS, list[Remedy]()
    several = list(_settings(config, now, memory))
    all_keys = {word.partition("=")[0]: word for settings in several for word in settings}
    for settings in [*several, list(all_keys.values())]:
        together = settings not in several
        if together and found:
            break
        if time.monotonic() > end:
            tell(f"stopped looking for settings after {SECONDS:.0f} s")
            break
        changed = changed_by(config, settings)
        if changed is None:
            continue
        tell(f"trying {' '.join(settings)}")
        # The model may refuse a setting, as a batch norm refuses a single sample.
        with contextlib.suppress(UserError, ValueError):
            traced = run.trace(changed, memory)
            if needed(traced.peak) <= memory:
                found.append(Remedy(tuple(settings), traced))
    return found


def changed_by(config: Config, settings: Sequence[str]) -> Config | None:
    """Return ``config`` with ``settings``; None if they contradict other keys."""
    values = config.model_dump(mode="json")
    for setting in settings:
        key, _, value = setting.partition("=")
        section, _, name = key.partition(".")
        values[section][name] = yaml.safe_load(value)
    changed = Config.model_validate(values)
    return None if any(contradictions(changed)) else changed


def _settings(config: Config, now: Traced, memory: int) -> Iterator[list[str]]:
    """Yield the settings of each advice for a training that ran out of memory."""
    train, ranks = config.train, config.job.world_size
    batching = Batching(train.batch_size, ranks, accumulation_of(train, ranks))
    used = MemorySettings(config, batching.micro_batch, ranks, now.parallel, gpu=True)
    for line in advice(used):
        settings = _leading(line)
        if settings and settings[0].startswith("train.micro_batch="):
            half = int(settings[0].partition("=")[2])
            settings[0] = f"train.micro_batch={min(half, _fitting_samples(now, memory))}"
        if settings and not settings[0].startswith("fsdp.cpu_offload="):
            yield settings
    if now.parallel == "fsdp" and config.fsdp.shard == "full":
        yield [f"job.nodes={2 * config.job.nodes}"]


def _leading(line: str) -> list[str]:
    """Return the words at the start of an advice that set keys: all of them belong together."""
    words = line.split()
    count = next((at for at, word in enumerate(words) if "=" not in word), len(words))
    return words[:count]


def _fitting_samples(now: Traced, memory: int) -> int:
    """Return the number of samples that fit if activations grow with the samples; at least one."""
    room = (memory - RESERVE_GIB * GIB) / (1 + FRAGMENTED) - (now.peak - now.parts.activations)
    return max(1, int(now.micro_batch * room / max(1, now.parts.activations)))
