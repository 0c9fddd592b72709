"""Watching a run from the terminal: one bar for rank 0, a line for each thing that happens to it."""

import sys
import time
from typing import Any

from tqdm import tqdm

from hpcrun.cli.outcome import describe_restart, print_end
from hpcrun.cli.tail import Tail
from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.launch import jobs
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Event, to_event
from hpcrun.run.files import parse_line

_POLL = 0.2
# How often the scheduler is asked whether the job lives: squeue is shared by everyone.
_ASK_LOCAL, _ASK_SLURM = 1.0, 15.0


def follow(run: RunDirectory, config: Config, *, stop_on_interrupt: bool) -> int:
    """Watch ``run`` until it ends; return its exit code.

    Args:
        stop_on_interrupt: Ctrl-C ends the run gracefully (it was started from this terminal); else
            it only ends the watching.
    """
    hint = "Ctrl-C saves and stops it" if stop_on_interrupt else "Ctrl-C leaves it running"
    print(f"hpcrun: {run.path} ({hint})", flush=True)
    watcher = _Watcher(run, config)
    interrupted = 0
    while True:
        try:
            if watcher.step():
                break
        except KeyboardInterrupt:
            interrupted += 1
            if not stop_on_interrupt:
                watcher.close()
                print(f"hpcrun: left running; `hpcrun logs -f {run.name}` follows it again")
                return 130
            _interrupt(run, watcher, interrupted)
    watcher.close()
    return print_end(run)


def _interrupt(run: RunDirectory, watcher: "_Watcher", times: int) -> None:
    if times == 1:
        watcher.say("hpcrun: saving a checkpoint, then stopping; Ctrl-C again ends it at once")
    else:
        watcher.say("hpcrun: ending it at once; it continues from its last checkpoint")
    try:
        (jobs.cancel if times == 1 else jobs.kill)(run)
    except UserError as error:
        watcher.say(f"hpcrun: {error}")


class _Watcher:
    """What has been read of a run's logs so far, and the bar that shows it."""

    def __init__(self, run: RunDirectory, config: Config) -> None:
        self._run, self._steps = run, config.train.steps
        self._events = Tail(run.events)
        self._metrics = Tail(run.metrics)
        # What an earlier job of this run has left is not news.
        self._events.skip_to_last(lambda line: b'"submitted"' in line)
        self._metrics.skip()
        self._started = time.monotonic()
        self._asked = self._started
        executor = jobs.current_job(run)
        self._ask_every = _ASK_SLURM if executor and executor[0] == "slurm" else _ASK_LOCAL
        self._log_tail: Tail | None = None
        self._bar: tqdm[Any] | None = None
        self._script = bool(config.command)

    def step(self) -> bool:
        """Show what is new; whether the run has ended."""
        ended = False
        if time.monotonic() - self._asked >= self._ask_every:
            self._asked = time.monotonic()
            ended = not jobs.state(self._run).live
        for line in self._events.read():
            value = parse_line(line)
            if value is not None and "event" in value:
                self._on_event(to_event(value))
        if self._log_tail is not None:
            for line in self._log_tail.read():
                self._on_log(line.decode(errors="replace"))
        for line in self._metrics.read():
            value = parse_line(line)
            if value is not None:
                self._on_metrics(value)
        if not ended:
            time.sleep(_POLL)
        return ended

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._bar is None:
            print(text, flush=True)
        else:
            self._bar.write(text, file=sys.stdout)

    def close(self) -> None:
        """Leave the bar where it stands."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None

    def _on_event(self, event: Event) -> None:
        if event.what == "opened" and event.attempt is not None:
            folder = self._run.attempt_logs(event.attempt.job, event.attempt.restart)
            self._log_tail = Tail(folder / "rank-00000.log")
        if event.what == "started":
            self._show_bar(event.step or 0)
        if event.what == "ended" and event.fields.get("restart_allowed"):
            self.say(describe_restart(event))

    def _on_log(self, line: str) -> None:
        """Rank 0's own words; a script's whole output, because nothing else shows its progress."""
        told = line.startswith("hpcrun: ") and not line.startswith("hpcrun: saved step")
        if self._script or told:
            self.say(line)

    def _show_bar(self, step: int) -> None:
        if self._bar is None:
            self._bar = tqdm(total=self._steps, unit="step", dynamic_ncols=True, smoothing=0.1)
        self._bar.initial = step
        self._bar.reset(total=self._steps)
        self._bar.n = step
        self._bar.refresh()

    def _on_metrics(self, line: dict[str, Any]) -> None:
        if self._bar is None:
            self._show_bar(0)
        assert self._bar is not None
        shown: dict[str, str] = {}
        if "loss" in line:
            shown["loss"] = f"{line['loss']:.4f}"
        for key, value in line.items():
            if key.endswith("_per_second"):
                shown[key.removesuffix("_per_second") + "/s"] = f"{value:,.0f}"
        if "validation_loss" in line:
            self.say(f"step {line['step']}: validation loss {line['validation_loss']:.4f}")
        if shown:
            self._bar.set_postfix(shown, refresh=False)
        self._bar.update(line["step"] - self._bar.n)
