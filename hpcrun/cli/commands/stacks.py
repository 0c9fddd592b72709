"""Show where the Python code of a run's ranks is now, and which rank is behind.

Each rank of a running job writes its stacks into the run directory, and this
command reads them there, without ssh or srun. Ranks with equal stacks
are shown together. The training continues.

The stacks of a script (`hpcrun submit -- COMMAND`) need py-spy in the job's
environment.
"""

import argparse
import time
from dataclasses import asdict

from hpcrun.api.logs import last_attempt
from hpcrun.cli.arguments import add_run, find_run
from hpcrun.cli.output import print_json
from hpcrun.config import load_resolved
from hpcrun.diagnose.stacks import folded, group_lines, ranges, summary
from hpcrun.errors import UserError
from hpcrun.printing import say
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.journal import Journal
from hpcrun.run.stacks import Mailbox, Reply
from hpcrun.slurm.launch import jobs

_SILENT = (
    "does not answer: it has not started training or has ended, it is stopped or in C code that holds "
    "Python's lock, or its node cannot reach the run directory"
)
_POLL = 0.2
# Added to the pause between two polls of a rank: py-spy reads the processes of a script.
_WAIT = 8.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add_run(parser)
    parser.add_argument(
        "--threads", action="store_true", help="show all threads, not only the main thread"
    )
    parser.add_argument(
        "--wait",
        type=float,
        metavar="S",
        help=f"seconds to wait for answers (default: {_WAIT:g}, longer above 50 ranks)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Ask, wait and print; return 1 if no rank answers."""
    if arguments.wait is not None and not 0 < arguments.wait < 3600:
        raise UserError(f"--wait {arguments.wait:g}: should be above 0 and below 3600 seconds")
    directory = find_run(arguments)
    attempt = _running_attempt(directory)
    tasks = _tasks_of(directory, attempt)
    mail = Mailbox(directory.attempt_logs(attempt), tasks)
    begun = time.monotonic()
    replies = _ask(mail, tasks, arguments.wait or mail.pause + _WAIT)
    groups = folded(
        (stack for reply in replies.values() for stack in reply.stacks),
        all_threads=arguments.threads,
    )
    unread = [task for task in range(tasks) if task not in replies or not replies[task].stacks]
    problems = {
        task: (replies[task].problem or "has no Python process") if task in replies else _SILENT
        for task in unread
    }
    if arguments.json:
        print_json(
            {
                "job": attempt.job,
                "restart": attempt.restart,
                "in_place": attempt.in_place,
                "summary": summary(groups, unread) if groups else None,
                "silent": {str(task): _SILENT for task in unread if task not in replies},
                "replies": [asdict(reply) for _, reply in sorted(replies.items())],
            }
        )
        return int(not replies)
    heading = f"{directory.name}: job {attempt.job}, restart {attempt.label}"
    seconds = time.monotonic() - begun
    say(f"{heading}: {len(replies)} of {tasks} tasks answered in {seconds:.1f} s")
    for problem in sorted(set(problems.values())):
        say(f"{ranges([task for task in unread if problems[task] == problem], 'rank')}: {problem}")
    if groups:
        say(summary(groups, unread))
    for group in groups:
        say("", *group_lines(group))
    return int(not replies)


def _running_attempt(run: RunDirectory) -> Attempt:
    """Return the attempt with running ranks; raises UserError if there is none."""
    state = jobs.state(run)
    attempt = last_attempt(run)
    if state.word != "running" or attempt is None:
        remedy = "`hpcrun doctor` reads its logs" if not state.live else "look again later"
        raise UserError(f"{run.name}: is {state.word}, and only a running job has stacks; {remedy}")
    return attempt


def _tasks_of(run: RunDirectory, attempt: Attempt) -> int:
    """Return the number of tasks of ``attempt``; with a range of nodes only its event has it."""
    opened = Journal(run).read().opening(attempt)
    count = opened.ranks if opened else None
    return count if count is not None else load_resolved(run.config).job.world_size


def _ask(mail: Mailbox, tasks: int, seconds: float) -> dict[int, Reply]:
    """Return the answers that arrive within ``seconds``, by task."""
    try:
        request_id = mail.ask()
    except FileNotFoundError:
        raise UserError(
            f"{mail.logs}: no rank has started training; try again later, or see `hpcrun logs`"
        ) from None
    end = time.monotonic() + seconds
    found: dict[int, Reply] = {}
    while len(found) < tasks and time.monotonic() < end:
        time.sleep(_POLL)
        found = mail.replies(request_id)
    return found
