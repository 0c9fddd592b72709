"""The part of ``hpcrun submit`` that submits a sweep, or prints the table of its runs."""

import argparse
import dataclasses
import shlex
import sys
from collections import Counter
from collections.abc import Sequence

from hpcrun.api.places import handle, runs_folder
from hpcrun.api.submission.sending import jobs_to_send
from hpcrun.api.sweeps.handover import SubmittedSweep, run_list, submit_sweep
from hpcrun.api.sweeps.plan import Planned, SweepPlan, plan_sweep
from hpcrun.api.sweeps.request import SweepRequest, read_axes, read_sweep_file, text_of
from hpcrun.api.sweeps.search import Search
from hpcrun.api.sweeps.study import plan_study, run_study
from hpcrun.cli.arguments import request_of
from hpcrun.cli.output import aligned, print_json
from hpcrun.errors import UserError
from hpcrun.printing import progress_bar, say
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch.batch_script import batch_request, batch_script

_WORDS = {
    "new": "to submit",
    "again": "to submit again",
    "running": "running",
    "finished": "finished",
    "left": "left as before",
    "pruned": "pruned",
}


def run_sweep(arguments: argparse.Namespace) -> int:
    """Submit the sweep of a command line, or print its runs."""
    if arguments.follow:
        raise UserError("--follow: watches one run; submit, then `hpcrun logs -f SWEEP/000`")
    wish = read_sweep_file(arguments.sweep_file) if arguments.sweep_file else SweepRequest()
    if wish.search is not None:
        return _run_search(arguments, wish.search)
    wish = dataclasses.replace(wish, blocks=[*wish.blocks, *read_axes(arguments.sweep)])
    plan = plan_sweep(request_of(arguments), wish)
    if arguments.dry_run:
        return _show(plan, arguments.json)
    done = submit_sweep(plan)
    if arguments.json:
        print_json(_as_json(plan, done.planned) | {"jobs": [vars(job) for job in done.jobs]})
    else:
        say(*_reported(plan, done))
    return 0


def _run_search(arguments: argparse.Namespace, search: Search) -> int:
    """Run the search to its end, with a line for each change; or print its first run."""
    if arguments.sweep or arguments.detach:
        raise UserError(f"{arguments.sweep_file}: the search runs here; omit --sweep and --detach")
    plan, first = plan_study(request_of(arguments), search)
    if arguments.dry_run:
        return _show(first, arguments.json)
    lines = sys.stderr if arguments.json else None
    with progress_bar("trial", text=plan.folder.name) as bar:
        end = run_study(plan, lambda line: bar.say(f"hpcrun: {line}", stream=lines), bar.move)
    if arguments.json:
        print_json({"sweep": str(plan.folder), **end})
    return 0 if end["best"] is not None and not end["left"] else 1


def _show(plan: SweepPlan, as_json: bool) -> int:
    _, planned = plan.decided()
    wanted = [one for one in planned if one.submitted]
    script = _script(plan, wanted) if wanted and plan.executor == "slurm" else None
    if as_json:
        print_json(_as_json(plan, planned) | {"script": script})
        return 0
    say("# dry run: nothing is submitted or written", f"# sweep folder: {plan.folder}")
    say(f"# executor: {plan.executor}; {_counted(planned)}", "")
    say(*_table(planned))
    if script is not None:
        say("", *script.rstrip("\n").split("\n"))
    return 0


def _script(plan: SweepPlan, wanted: Sequence[Planned]) -> str:
    """Return the script of the first array that a submission would send."""
    runs = [one.to_start for one in wanted]
    first = jobs_to_send(run_list(plan, lambda: runs), runs)[0]
    request = batch_request(RunDirectory(plan.folder), first.config, array=first.array)
    return batch_script(request)


def _table(planned: Sequence[Planned]) -> list[str]:
    """Return a line for each run: name, values, and the action of a submission."""
    keys = list(dict.fromkeys(key for one in planned for key in one.element.values))
    rows = [["run", *keys, ""]]
    for one in planned:
        values = one.element.values
        shown = [text_of(values[key]) if key in values else "" for key in keys]
        rows.append([one.run.path.name, *shown, _state(one)])
    return aligned(rows)


def _state(one: Planned) -> str:
    word = _WORDS[one.action]
    return f"{word} ({one.word})" if one.action in ("again", "left") else word


def _counted(planned: Sequence[Planned]) -> str:
    counts = Counter(_WORDS[one.action] for one in planned)
    reported = ", ".join(f"{counts[word]} {word}" for word in _WORDS.values() if counts[word])
    return f"{len(planned)} {'run' if len(planned) == 1 else 'runs'}: {reported}"


def _as_json(plan: SweepPlan, planned: Sequence[Planned]) -> dict[str, object]:
    return {
        "sweep": str(plan.folder),
        "executor": plan.executor,
        "runs": [
            {
                "run": str(one.run.path),
                "values": one.element.values,
                "action": one.action,
                "state": one.word,
            }
            for one in planned
        ],
    }


def _reported(plan: SweepPlan, done: SubmittedSweep) -> list[str]:
    name = plan.folder.name
    sent = sum(one.submitted for one in done.planned)
    if not sent:
        return [f"hpcrun: {name}: nothing to submit; {_counted(done.planned)}"]
    left = len(done.planned) - sent
    rest = f"; {left} left as they are" if left else ""
    first = next(one for one in done.planned if one.submitted)
    reported = f"hpcrun: {name}: {sent} {'run' if sent == 1 else 'runs'} submitted{rest}"
    if plan.executor == "slurm":
        numbers = ", ".join(job.job_id for job in done.jobs)
        reported += f", as job {'array' if len(done.jobs) == 1 else 'arrays'} {numbers} (slurm)"
    else:
        reported += " (local)"
    one = handle(first.run)
    short = plan.folder.parent == runs_folder()
    folder = shlex.quote(name if short else str(plan.folder))
    return [
        reported,
        f"  sweep folder   {plan.folder}",
        f"  watch all      hpcrun status --watch {folder}",
        f"  follow one     hpcrun logs -f {one}",
        f"  stop one       hpcrun cancel {one}",
        f"  stop all       hpcrun cancel {folder}",
        f"  continue one   hpcrun resume {one}",
        f"  compare        hpcrun aggregate {folder}",
    ]
