"""The next start of a run that the policy starts again: the only place that chooses and makes it."""

import subprocess
import sys
import traceback
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from hpcrun import exit_codes
from hpcrun.config import Config, Job
from hpcrun.diagnose.read_log import scheduler_word
from hpcrun.job import notifying
from hpcrun.job.bad_nodes import exclude_bad_nodes
from hpcrun.job.finalize import Classification, write_result
from hpcrun.job.restart import new_step
from hpcrun.job.restart.requeue import (
    WORD_PATIENCE,
    Clock,
    ContinuationError,
    already,
    is_cancelled,
    requeue,
    submit_successor,
    withdraw,
)
from hpcrun.job.scheduler_view import batch_log, query_job, reason_given
from hpcrun.job.srun import step_name
from hpcrun.job.step_process import arrived_signals, was_upgraded
from hpcrun.ports.entry_points import STRATEGIES
from hpcrun.ports.strategies import AttemptEnd, Start, next_start
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import CancelRequested, Cause, GivenUp, RequeueFailed
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import State

if TYPE_CHECKING:
    from hpcrun.nodes.job_nodes import JobNodes

# Imported with this module: an upgrade of hpcrun may replace the file while the ranks run.
STRATEGIES.load("in-place")


@dataclass(frozen=True)
class EndedAttempt:
    """The end of the attempt, and the run's config.

    ``sender``: the command that gets the notification of this end, if there is one.
    """

    classification: Classification
    config: Config
    sender: "subprocess.Popen[bytes] | None" = None

    @property
    def job(self) -> Job:
        """The run's `job:` section."""
        return self.config.job


@dataclass(frozen=True)
class Conclusion:
    """The exit code for the batch script, or the attempt that follows inside the allocation."""

    code: int
    following: Attempt | None = None


@dataclass(frozen=True)
class NextStart:
    """The next start of a run that the policy starts again after ``attempt``.

    ``until``: the time (Unix seconds) until which to ask a controller that does not answer.
    """

    run: RunDirectory
    attempt: Attempt
    ended: EndedAttempt
    until: float
    own_script: bool
    clock: Clock

    def choose(self, nodes: "JobNodes | None", obstacle: str | None) -> Conclusion:
        """Let the next attempt start. The only place that chooses how.

        Args:
            obstacle: why no step can follow, if that is known already.
        """
        start = self._chosen(nodes)
        if start.how == "job":
            return self._another_job()
        if start.how == "requeue":
            obstacle = obstacle or start.reason
        else:
            try:
                obstacle = obstacle or self.step_obstacle(nodes)
            except Exception as error:
                # It costs a requeue and not the run.
                traceback.print_exc()
                obstacle = str(error)
        if start.how == "step" and obstacle is None:
            say_line("the next attempt starts inside the allocation")
            return Conclusion(exit_codes.UNFINISHED, self.attempt.following)
        say_line(f"no start inside the allocation: {obstacle}")
        return self.requeue()

    def _chosen(self, nodes: "JobNodes | None") -> Start:
        """Return the start that a strategy chooses; each start looks for a cancellation once more."""
        found = self.ended.classification
        try:
            state = found.state or Journal(self.run).read()
            facts = (state, self.attempt, found.cause, found.line, self.ended.config)
            end = AttemptEnd(self.run.path, *facts, watched=nodes is not None)
            start = next_start(end, say_line, lambda: self._reason() == "cancelled")
        except OSError as error:
            return Start("requeue", str(error))
        return start or Start("requeue", "the run is cancelled")

    def _another_job(self) -> Conclusion:
        """Let a new job follow, as a strategy has chosen, unless Slurm or a person has decided already."""
        view = query_job(self.attempt.job)
        settled = view and already(self.attempt, view, self._reason)
        if settled == "cancelled":
            return Conclusion(self._cancelled())
        if settled or view is None or self.own_script:
            # The requeue asks a controller again that does not answer, and knows the other answers.
            return self.requeue()
        return Conclusion(self._continue_in_another_job())

    def step_obstacle(self, nodes: "JobNodes | None" = None) -> str | None:
        """Return why the run cannot start again as a new step of the job, or None. Ends the old step."""
        attempt, job, found = self.attempt, self.ended.job, self.ended.classification
        allocation = new_step.read_allocation(
            attempt, found, after=job.exclude_after, hours=job.exclude_hours
        )
        if nodes is not None:
            dead, avoided = nodes.without_bad_nodes(
                allocation.nodes, allocation.dead, allocation.avoided, found.diagnosis
            )
            allocation = replace(allocation, dead=dead, avoided=avoided)
        lead = float(job.signal_lead)
        obstacle = new_step.allocation_obstacle(attempt, allocation, self.clock.now(), lead)
        if obstacle is None and nodes is not None and nodes.has_lost_step:
            obstacle = nodes.end_lost_step()
        elif obstacle is None:
            obstacle = new_step.end_step(attempt, step_name(attempt))
        if obstacle is None and was_upgraded():
            obstacle = "hpcrun was upgraded while the job ran"
        # Last: nothing may come between these checks and the start.
        arrived = arrived_signals()
        if obstacle is None and arrived:
            obstacle = f"{min(arrived).name} arrived"
        return obstacle or self._request()

    def _request(self) -> str | None:
        """Return the request of a person against a start in place, as far as files can be read."""
        try:
            state = Journal(self.run).read()
        except OSError as error:
            self._complain_of_log(error)
            state = State(())
        if reason_given(self.run, self.attempt, state) == "cancelled":
            return "the run is cancelled"
        asked = state.asked_to_requeue(self.attempt)
        return "`hpcrun preempt` asked for a requeue" if asked else None

    def requeue(self) -> Conclusion:
        """Let Slurm start the job again."""
        became = requeue(
            self.attempt, self._failed, self._reason, until=self.until, clock=self.clock
        )
        if became == "requeued":
            self._exclude_bad_nodes(self.attempt.job)
            return Conclusion(exit_codes.DONE)
        if became == "cancelled":
            return Conclusion(self._cancelled())
        if became == "forbidden":
            return Conclusion(self._continue_in_another_job())
        if became == "by-slurm":
            say_line("Slurm requeues this job, because it ends in the grace time of its preemption")
        return Conclusion(exit_codes.UNFINISHED)

    def _failed(self, kind: str, words: str) -> None:
        Journal(self.run).note(RequeueFailed(attempt=self.attempt, cause=kind, reason=words))
        complain(f"{'not cancelled' if kind == 'cancel' else 'not requeued yet'}: {words}")

    def _exclude_bad_nodes(self, waiting: str) -> None:
        """Exclude bad nodes from the job ``waiting``; Slurm changes the nodes of a pending job only."""
        job, found = self.ended.job, self.ended.classification
        after, hours = job.exclude_after, job.exclude_hours
        exclude_bad_nodes(self.run, self.attempt, found, waiting, after=after, hours=hours)

    def _reason(self) -> str | None:
        """Return the reason of a person or of Slurm to end the attempt, as far as files can be read."""
        try:
            return reason_given(self.run, self.attempt, Journal(self.run).read())
        except OSError as error:
            self._complain_of_log(error)
            return scheduler_word(batch_log(self.run, self.attempt))

    def _complain_of_log(self, error: OSError) -> None:
        complain(f"{self.run.events}: {error.strerror}; only the reason from Slurm is known")

    def _cancelled(self) -> int:
        say_line("cancelled after its end: it is not started again")
        found = self.ended.classification
        reason = f"cancelled before its restart after {found.cause.value}"
        try:
            journal = Journal(self.run)
            state = journal.read()
            if not state.asked_to_end(self.attempt):
                journal.note(CancelRequested(attempt=self.attempt))
                state = journal.read()
            write_result(self.run, state, Cause.CANCELLED, found.line, reason, state.committed)
        except OSError as error:
            complain(f"{self.run.result}: {error.strerror}")
        self._notify_given_up(reason, "cancelled")
        return exit_codes.TERMINATED

    def _notify_given_up(self, reason: str, name: str) -> None:
        """Record and notify that no job continues the run although the policy allows a restart."""
        cause = self.ended.classification.cause.value
        Journal(self.run).note(GivenUp(attempt=self.attempt, cause=cause, reason=reason))
        about = notifying.Notification(name, self.attempt, cause, reason)
        notifying.wait(notifying.start(self.run, self.ended.config.watch, about))

    def _continue_in_another_job(self) -> int:
        """Submit the follow-up job of a job that Slurm does not requeue; return the exit code."""
        run, attempt = self.run, self.attempt
        try:
            if self.own_script:
                raise ContinuationError(
                    "hpcrun does not know the options of your batch script: submit the script again, or "
                    f"continue with `hpcrun resume {run.name}`"
                )
            job = submit_successor(run, attempt, self._failed, until=self.until, clock=self.clock)
        except ContinuationError as problem:
            failed = RequeueFailed(attempt=attempt, cause="no-successor", reason=str(problem))
            Journal(run).note(failed)
            complain(f"no job continues {run.name}: {problem}")
            self._notify_given_up(f"no job continues the run: {problem}", "stopped")
            return exit_codes.UNFINISHED
        say_line(
            f"Slurm does not requeue this job: job {job} continues {run.name} after its end; submit the jobs "
            "that wait for this job (--dependency) again, because Slurm cancels them"
        )
        view = query_job(attempt.job)
        if self._reason() == "cancelled" or (
            view is not None and is_cancelled(attempt, view, self._reason, WORD_PATIENCE)
        ):
            kept = withdraw(job, self.clock)
            if kept is None:
                return self._cancelled()
            complain(f"not cancelled: {kept}; `scancel {job}` ends it")
        self._exclude_bad_nodes(job)
        return exit_codes.UNFINISHED


def say_line(words: str) -> None:
    """Print ``words`` to the batch log."""
    print(f"hpcrun: {words}", flush=True)


def complain(words: str) -> None:
    """Print ``words`` to the standard error."""
    print(f"hpcrun: {words}", file=sys.stderr, flush=True)
