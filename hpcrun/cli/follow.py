"""Watch a run from the terminal: one bar for rank 0, and a line for each event."""

import math
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tqdm import tqdm

from hpcrun.api.interrupts import noted
from hpcrun.api.places import handle
from hpcrun.cli.output import plural, print_end
from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.exit_codes import INTERRUPTED
from hpcrun.printing import bar_columns, draws_bars, escaped, logged, say
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import open_regular, parse_line
from hpcrun.run.journal.events import BadInput, Ended, Event, Opened, Started, Submitted, to_event
from hpcrun.run.journal.journal import signature
from hpcrun.run.progress_lines import Pace, StepLines, facts_of, in_words, validation_line
from hpcrun.slurm.launch import jobs, stopping
from hpcrun.slurm.launch.jobs import pauses

# Seconds between two reads of the run's files; on a cluster their server is shared by everyone.
_POLL_LOCAL, _POLL_SLURM = 0.2, 1.0
# Seconds until the scheduler is asked whether the job lives, the first time; see `pauses`.
_ASK_LOCAL, _ASK_SLURM = 1.0, 15.0
# Lines that are not shown: saves; a rank that lost its peers, because the report of the end names the first
# failure; and a hang, because the report of the end repeats these words.
_NOISE = re.compile(r"hpcrun: (saved step|rank \d+ lost its peers|no progress for )")
_BLOCK = 1 << 16


def follow(run: RunDirectory, config: Config, *, stop_on_interrupt: bool) -> int:
    """Watch ``run`` until it ends; return its exit code.

    Args:
        stop_on_interrupt: Ctrl-C saves and stops the run (it was started from this terminal);
            otherwise Ctrl-C only ends the watching.
    """
    watcher = _Watcher(run, config)
    handled = 0
    with noted(signal.SIGINT) as interrupts:
        watcher.greet(stop_on_interrupt)
        while not watcher.step():
            if len(interrupts) == handled:
                continue
            handled += 1
            if not stop_on_interrupt:
                watcher.close()
                say(f"hpcrun: left running; `hpcrun logs -f {handle(run)}` follows it again")
                return INTERRUPTED
            watcher.interrupt(again=handled > 1)
        watcher.close()
        return print_end(run)


class _Watcher:
    """The lines of a run's logs read so far, and the bar that shows them."""

    def __init__(self, run: RunDirectory, config: Config) -> None:
        self._run, self._config = run, config
        self._events = Tail(run.events)
        self._metrics = Tail(run.metrics)
        # Skip the lines of an earlier job of this run.
        self._events.skip_to_last(
            lambda line: isinstance(to_event(parse_line(line) or {}), Submitted)
        )
        self._metrics.skip_to_last(lambda _line: True)
        self._asked = time.monotonic()
        self._executor, self._job = jobs.current_job(run) or ("", "")
        on_slurm = self._executor == "slurm"
        self._poll = _POLL_SLURM if on_slurm else _POLL_LOCAL
        self._ask_every = 0.0
        self._pace(_ASK_SLURM if on_slurm else _ASK_LOCAL)
        self._log_tail: Tail | None = None
        self._opened = False
        # The report of the end repeats these lines.
        self._last_word: list[str] = []
        self._waiting = ""
        self._progress = ProgressDisplay(None if config.command else config.train.steps)
        self.say, self.close = self._progress.say, self._progress.close

    def greet(self, stop_on_interrupt: bool) -> None:
        """Print the watched run, its directory, and the effect of Ctrl-C."""
        job = self._config.job
        place = "on this machine" if self._executor == "local" else f"on {self._executor}"
        ranks = plural(job.gpus, "rank")
        ranks = ranks if job.nodes == 1 else f"{job.nodes} nodes x {ranks}"
        self.say(f"hpcrun: {self._run.name}: job {self._job} {place}, {ranks}, is starting")
        self.say(f"  run directory  {self._run.path}")
        if stop_on_interrupt:
            does = "sends SIGTERM to the script" if self._config.command else "saves and stops it"
            self.say(f"  Ctrl-C         {does}; closing this terminal leaves it running")
        else:
            self.say("  Ctrl-C         leaves it running")

    def interrupt(self, again: bool) -> None:
        """Stop the run, or kill it if the user interrupts ``again``."""
        if again:
            self.say("hpcrun: ending it now; it continues from its last checkpoint")
        else:
            does = "saving a checkpoint, then stopping"
            if self._config.command:
                does = "the script gets SIGTERM, and is given time to save"
            self.say(f"hpcrun: {does}; Ctrl-C again ends it immediately")
        try:
            (stopping.kill if again else stopping.cancel)(self._run)
        except UserError as error:
            self.say(f"hpcrun: {error}")

    def step(self) -> bool:
        """Show new lines; return True if the run has ended."""
        ended = False
        if time.monotonic() - self._asked >= self._ask_every:
            ended = self._ask()
            self._asked, self._ask_every = time.monotonic(), next(self._pauses)
        for line in self._events.read():
            event = to_event(parse_line(line) or {})
            if event is not None:
                self._on_event(event)
        if self._log_tail is not None:
            self._on_lines(self._log_tail.read(ended=ended))
        for line in self._metrics.read():
            self._on_metrics(parse_line(line) or {})
        if not ended:
            time.sleep(self._poll)
        return ended

    def _pace(self, first: float) -> None:
        self._pauses = pauses(self._executor, first)
        self._ask_every = next(self._pauses)

    def _ask(self) -> bool:
        now = jobs.state(self._run)
        # The reason why a job waits; once it runs, its ranks print more.
        if now.word == "pending" and now.detail not in ("", self._waiting) and not self._opened:
            self._waiting = now.detail
            self.say(f"hpcrun: {self._run.name}: job {self._job}: {now.detail}")
        return not now.live

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Opened) and event.attempt is not None:
            self._opened = True
            folder = self._run.attempt_logs(event.attempt)
            if self._log_tail is not None:
                self._on_lines(self._log_tail.read(ended=True))
            self._log_tail = Tail(folder / "rank-00000.log")
        if isinstance(event, BadInput):
            self._last_word.append(escaped(str(event.reason)))
        if isinstance(event, Started) and not self._config.command:
            self._progress.begin(event.step or 0, event.time)
        if isinstance(event, Ended) and event.restart_allowed:
            self.say(f"hpcrun: {event.reason}; {event.decision}")
        elif isinstance(event, Ended):
            # The job ends now: look often, because a person waits for the prompt.
            self._pace(_ASK_LOCAL)

    def _on_lines(self, lines: Iterator[bytes]) -> None:
        """Show the package's lines of rank 0; of a script all lines, because only they show its progress.

        A task can print such lines too, so each line is shown with the prefix ``rank 0:``.
        """
        for line in map(logged, lines):
            words = line.removeprefix("hpcrun: ")
            reported = words != line and not _NOISE.match(line)
            if (self._config.command or reported) and words not in self._last_word:
                self.say(f"rank 0: {words}")

    def _on_metrics(self, line: dict[str, object]) -> None:
        step = line.get("step")
        if not isinstance(step, int):
            return
        validated = validation_line(line)
        if validated is not None:
            self.say(validated)
        when = line.get("time")
        if not isinstance(when, int | float) or not math.isfinite(when):
            when = time.time()
        self._progress.update(step, when, facts_of(line))


_BAR = "{percentage:3.0f}%|{bar}| step {n_fmt}/{total_fmt}{postfix}"
# The steps of a script are unknown.
_COUNT = "step {n_fmt}{postfix}"


class ProgressDisplay:
    """The steps of a run: a bar if the terminal can move its cursor, else a line every ten seconds."""

    def __init__(self, total: int | None) -> None:
        """``total``: the steps of the run; None: unknown, as those of a script."""
        self._total, self._pace, self._lines = total, Pace(total), StepLines(total)
        self._draws = draws_bars()
        self._bar: tqdm[Any] | None = None

    def begin(self, step: int, when: float) -> None:
        """Start an attempt at ``step``; ``when``: Unix seconds by the attempt's clock."""
        self._pace.begin(step, when)
        self._lines.begin(step, when)
        if self._draws:
            self._open(step)

    def update(self, step: int, when: float, facts: Mapping[str, str]) -> None:
        """Show ``step`` steps done at ``when``; ``facts``: loss and speed, in words."""
        if not self._draws:
            line = self._lines.line(step, when, facts)
            say(*([] if line is None else [line]))
            return
        bar = self._open(0) if self._bar is None else self._bar
        bar.ncols = bar_columns()
        if facts:
            bar.set_postfix_str(in_words(facts, self._pace.left(step, when)), False)
        bar.update(step - bar.n)

    def say(self, text: str) -> None:
        """Print a separate line, above the bar."""
        if self._bar is None:
            say(text)
            return
        self._bar.ncols = bar_columns()
        with tqdm.external_write_mode(file=sys.stdout):
            say(text)

    def close(self, leave: bool = True) -> None:
        """Close the bar; ``leave``: keep it on the screen."""
        if self._bar is not None:
            self._bar.leave = leave
            self._bar.close()
            self._bar = None

    def _open(self, step: int) -> "tqdm[Any]":
        self.close(leave=False)
        self._bar = tqdm(
            total=self._total,
            initial=step,
            file=sys.stderr,
            smoothing=0.1,
            ncols=bar_columns(),
            bar_format=_COUNT if self._total is None else _BAR,
        )
        return self._bar


class Tail:
    """Yields the lines that were added to ``path`` since the last read. The file may be created later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self, *, ended: bool = False) -> Iterator[bytes]:
        """Yield the whole lines that the file has now, without their ends.

        The file is open only while a block is read: a run may have more ranks than a process may have open
        files, and a log may be too large for the memory.

        Args:
            ended: no process completes an unfinished last line, so it is yielded too.
        """
        end = signature(self._path)
        rest = b""
        while end is not None and (left := end[1] - self._offset - len(rest)) > 0:
            try:
                with open_regular(self._path) as stream:
                    stream.seek(self._offset + len(rest))
                    block = stream.read(min(left, _BLOCK))
            except FileNotFoundError:
                return
            if not block:
                break
            *lines, rest = (rest + block).split(b"\n")
            for line in lines:
                self._offset += len(line) + 1
                yield line
        if ended and rest:
            self._offset += len(rest)
            yield rest

    def skip_to_last(self, wanted: Callable[[bytes], bool]) -> None:
        """Skip everything up to and including the last line that is ``wanted``."""
        start = offset = self._offset
        for line in self.read():
            offset += len(line) + 1
            if wanted(line):
                start = offset
        self._offset = start
