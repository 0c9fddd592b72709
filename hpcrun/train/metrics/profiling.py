"""Profile a window of steps with torch's profiler: a trace per rank, and the most expensive operations."""

import sys
from typing import Any

import torch

from hpcrun.devices import accelerator
from hpcrun.run.directory import RunDirectory
from hpcrun.train.metrics.timing import Stopwatch
from hpcrun.train.phase import PROFILING, Position

_NEVER = -1
_ROWS = 30
_SHOWN = 5


def steps_of(window: str | None) -> range:
    """Parse ``10-15`` as the steps from 9 to 14: users count from 1, as metrics.jsonl does."""
    if window is None:
        return range(0)
    first, _, last = window.partition("-")
    return range(int(first) - 1, int(last or first))


class Profile:
    """Profiles the steps of the window; in other steps it only compares two numbers."""

    def __init__(
        self,
        run: RunDirectory,
        window: str | None,
        start: int,
        *,
        rank: int,
        device: torch.device,
        watch: Stopwatch,
        position: Position,
    ) -> None:
        """``window``: as in the config; ``start``: the first step of this process."""
        self._folder, self._rank = run.profile, rank
        self._device, self._watch, self._position = device, watch, position
        steps = steps_of(window)
        self._last = steps.stop
        self._next = max(steps.start, start) if start < steps.stop else _NEVER
        self._first = self._next
        self._profiler: Any = None

    def before(self, step: int) -> None:
        """Start or end the profile; call it at the beginning of every step."""
        if step == self._next:
            self._turn(step)

    def close(self, done: int) -> None:
        """End the profile if training ends in the window; ``done``: finished steps."""
        if self._profiler is not None:
            self._turn(done)

    @property
    def _on_gpu(self) -> bool:
        return accelerator.is_accelerator(self._device)

    def _turn(self, done: int) -> None:
        with self._position.at(PROFILING), self._watch.paused():
            if self._profiler is None:
                self._begin()
            else:
                self._end(done)

    def _begin(self) -> None:
        self._profiler = torch.profiler.profile(
            activities=accelerator.profiled(self._device), record_shapes=True
        )
        self._profiler.start()
        self._next = self._last

    def _end(self, done: int) -> None:
        profiler, self._profiler, self._next = self._profiler, None, _NEVER
        accelerator.synchronize(self._device)
        profiler.stop()
        operations = profiler.key_averages()
        kind = "self_device_time_total" if self._on_gpu else "self_cpu_time_total"
        name = f"rank-{self._rank:05d}"
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            profiler.export_chrome_trace(str(self._folder / f"trace-{name}.json.gz"))
            table = operations.table(sort_by=kind, row_limit=_ROWS, max_name_column_width=80)
            (self._folder / f"operations-{name}.txt").write_text(table)
        except (OSError, RuntimeError) as error:
            print(f"hpcrun: cannot write the profile: {error}", file=sys.stderr, flush=True)
        if self._rank == 0:
            print(self._summary(operations, kind, done), flush=True)

    def _summary(self, operations: Any, kind: str, done: int) -> str:
        times = {it.key: getattr(it, kind) for it in operations}
        total = sum(times.values()) or 1.0
        top = sorted(times.items(), key=lambda item: -item[1])[:_SHOWN]
        where = "GPU" if self._on_gpu else "CPU"
        first = self._first + 1
        # The profiled steps, not the requested window: an attempt may start or end within it.
        steps = f"step {done}" if done == first else f"steps {first}-{done}"
        lines = [f"hpcrun: profile of {steps}, by {where} time, in {self._folder}"]
        lines += [
            f"hpcrun:   {spent / total:4.0%}  {spent / 1e3:8.1f} ms  {name}" for name, spent in top
        ]
        return "\n".join(lines)
