"""Copy the reports of a rank's script to the run directory, at a rate that does not load a file server."""

import contextlib
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from hpcrun.job.history import histories
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt, note, read_events
from hpcrun.run.rendezvous import memory_folder
from hpcrun.run.reports import VARIABLE, ScriptProgress, newest_report, publish, published

# Seconds between two published steps.
_PUBLISH = 5.0


@dataclass(frozen=True)
class _Unpublished:
    progress: ScriptProgress
    since: float


class ProgressWatch:
    """The reports of one rank's script; a context manager that creates and removes their folder.

    Rank 0 publishes without delay. Another rank publishes progress that rank 0 has not published ten seconds
    later: in many scripts only one rank reports, and in the others all ranks report the same.
    """

    def __init__(
        self,
        run: RunDirectory,
        attempt: Attempt,
        rank: int,
        ranks: int = 1,
        *,
        every: float = 1.0,
        for_rank_zero: float = 10.0,
    ) -> None:
        """Prepare the reports of ``rank``.

        Args:
            ranks: number of ranks of the attempt.
            every: seconds between two reads of the node's folder.
            for_rank_zero: seconds for which another rank waits for rank 0 to publish the same progress.
        """
        self._every, self._for_rank_zero = every, for_rank_zero
        self._run, self._attempt, self._rank = run, attempt, rank
        self._logs = run.attempt_logs(attempt.job, attempt.restart)
        # All ranks together read the published progress at most a hundred times a second.
        self._longest = ranks // 100
        self._folder: Path | None = None
        self._newest = ScriptProgress()
        self._known = ScriptProgress()
        self._waiting: _Unpublished | None = None
        self._looked = self._published_at = float("-inf")
        self._stop_at: float | None = None

    def __enter__(self) -> "ProgressWatch":
        try:
            # On a disk, each report would wait until the replaced file is written.
            made = tempfile.mkdtemp(prefix="hpcrun-reports-", dir=memory_folder())
            self._folder = Path(made)
        except OSError as error:
            print(f"hpcrun: no reports of progress: {error}", file=sys.stderr, flush=True)
        return self

    def __exit__(self, *_: object) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables through which ``hpcrun.report`` finds the folder."""
        return {} if self._folder is None else {VARIABLE: str(self._folder)}

    @property
    def step(self) -> int | None:
        """The newest step that the script has reported."""
        return self._newest.step

    @property
    def saved_since_stop(self) -> int | None:
        """The step that was reported as saved after the stop signal."""
        saved_at = self._newest.saved_at
        if self._stop_at is None or saved_at is None or saved_at < self._stop_at:
            return None
        return self._newest.saved

    @property
    def done(self) -> bool:
        """True if the script has reported that its work is finished."""
        return self._newest.done

    def stop_received(self) -> None:
        """Remember the time of the stop signal; later calls change nothing."""
        self._stop_at = self._stop_at or time.time()

    def note_start(self) -> None:
        """Write the event ``started``, with the newest step that earlier attempts have saved, if any."""
        steps = []
        with contextlib.suppress(OSError):
            steps = [
                record.committed for record in histories(read_events(self._run)) if record.committed
            ]
        begun = {"step": max(steps)} if steps else {}
        note(self._run, "started", self._attempt, **begun)

    def look(self, *, last: bool = False) -> None:
        """Read the reports, and publish new progress that is due.

        Args:
            last: the script has ended; publish now.
        """
        now = time.monotonic()
        if self._folder is None or (now - self._looked < self._every and not last):
            return
        self._looked = now
        self._newest = newest_report(self._folder)
        if self._known.covers(self._newest):
            self._waiting = None
            return
        try:
            self._publish(now, last)
        except OSError as error:
            print(f"hpcrun: the progress is not published: {error}", file=sys.stderr, flush=True)

    def _publish(self, now: float, last: bool) -> None:
        new_save = not self._known.covers(ScriptProgress(saved=self._newest.saved))
        if self._rank != 0 and not last:
            if self._waiting is None:
                self._waiting = _Unpublished(self._newest, now)
            if now - self._waiting.since < max(self._for_rank_zero, self._longest):
                return
        elif now - self._published_at < _PUBLISH and not new_save and not last:
            return
        theirs = published(self._logs)
        wanted = self._waiting.progress if self._waiting and not last else self._newest
        self._waiting = None
        self._known = theirs
        if theirs.covers(wanted):
            return
        both = theirs.with_news(self._newest)
        publish(self._logs, both)
        self._known, self._published_at = both, now
        if both.saved is not None and both.saved != theirs.saved:
            note(self._run, "saved", self._attempt, step=both.saved)
