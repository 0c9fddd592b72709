"""Start a training, or continue it where it stopped.

The same command again continues from the newest checkpoint; a finished run is
not changed. Without --name, other settings start a numbered run (train-2).
If Slurm answers, the job goes to sbatch. Otherwise it runs on this machine:
nodes x gpus processes, each with the environment of a Slurm task.

  hpcrun submit                                     the quick start
  hpcrun submit --nodes 2 --gpus 4 -c gpt.yaml train.lr=3e-4
  hpcrun submit task=my_module:MyTask train.steps=500
  hpcrun submit --nodes 2 --gpus 4 -- python train.py --its-own-arguments
  hpcrun submit --nodes 2 --gpus 4 --launcher torchrun -- train.py
  hpcrun submit -c gpt.yaml --sweep train.lr=1e-4,3e-4 --sweep seed=0:5

With --prepare it makes the run directory and stops: for people who submit
a batch script themselves (sbatch/train.sbatch), or start the ranks with
torchrun (tools/train_dist_torchrun.sh).
"""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.api.add_ons import add_on
from hpcrun.api.places import handle
from hpcrun.api.submission.plan import SubmissionPlan, plan_submission
from hpcrun.cli.arguments import add_options, add_runs_dir, add_sweep, request_of
from hpcrun.config import Config, Job, has_secrets, masked_values, script_yaml, to_yaml
from hpcrun.errors import UserError
from hpcrun.printing import say, say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.slurm.launch.planned import preview

if TYPE_CHECKING:
    from hpcrun.slurm.launch.submitted import SubmittedJob


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = "hpcrun submit [options] [key.sub=value ...] [-- command ...]"
    what = parser.add_argument_group("what to run")
    what.add_argument("-c", "--config", type=Path, metavar="FILE", help="YAML or JSON config")
    add_options(what, Config)
    what.add_argument("overrides", nargs="*", metavar="key.sub=value", help="config overrides")
    add_runs_dir(what)
    add_sweep(parser)
    where = parser.add_argument_group("where to run it")
    add_options(where, Job)
    where.add_argument(
        "--profile", metavar="NAME", help="site profile: a name or a path; '' for none"
    )
    add_snapshot(what, default=False)
    how = parser.add_argument_group("what to show")
    add_following(how)
    how.add_argument(
        "--dry-run", action="store_true", help="print script and config, submit nothing"
    )
    how.add_argument(
        "--prepare",
        action="store_true",
        help="make the run directory and print its sbatch command; submit nothing",
    )


def add_snapshot(parser: argparse._ActionsContainer, *, default: bool | None) -> None:
    """Add ``--no-snapshot``."""
    parser.add_argument(
        "--no-snapshot",
        action="store_true",
        default=default,
        help="run the code in the working tree, not a copy",
    )


def add_following(parser: argparse._ActionsContainer) -> None:
    """Add the options for what follows a submission."""
    parser.add_argument(
        "--follow", action="store_true", help="watch the run (default for local runs)"
    )
    parser.add_argument("--detach", action="store_true", help="return after the submission")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object; implies --detach"
    )


def run(arguments: argparse.Namespace) -> int:
    """Submit the run, and follow it if requested; return the run's exit code if it was followed."""
    require_one_way(arguments)
    if arguments.sweep or arguments.sweep_file:
        code: int = add_on("sweep on a command line")(arguments)
        return code
    if arguments.prepare and arguments.follow:
        raise UserError("--prepare submits nothing; omit --follow")
    plan = plan_submission(request_of(arguments))
    if arguments.dry_run:
        plan.require_packages()
        return _show(plan, arguments.json)
    return start(plan, arguments)


def require_one_way(arguments: argparse.Namespace) -> None:
    """Raise UserError if the options ask both to watch the run and to return."""
    if arguments.follow and (arguments.detach or arguments.json):
        raise UserError("--follow and --detach (or --json) exclude each other; choose one")


def start(plan: SubmissionPlan, arguments: argparse.Namespace) -> int:
    """Carry out ``plan`` unless it is finished, and follow the run with --follow or on this machine.

    Raises:
        UserError: a job has the run already, or it cannot be submitted.
    """
    if plan.finished is not None:
        return _say_finished(plan.run, plan.finished, arguments.json)
    run, executor = plan.run, plan.executor
    if executor == "debug" and arguments.json:
        raise UserError("--json shows no training; omit it with --executor debug")
    # A dry run does not come here, and does not import what only a submission needs.
    from hpcrun.api.submission.handover import submit_run

    submitted = submit_run(plan)
    if executor == "prepared":
        return _say_prepared(run, plan.config, arguments.json)
    if submitted is None:
        from hpcrun.api.submission.here import run_here

        return run_here(run)
    if arguments.json:
        from hpcrun.cli.output import print_json

        print_json({"run": str(run.path), **vars(submitted)})
        return 0
    local = submitted.executor == "local"
    if arguments.detach or not (local or arguments.follow):
        say(*_advice(run, submitted))
        return 0
    from hpcrun.cli.follow import follow

    return follow(run, plan.config, stop_on_interrupt=local)


def _say_prepared(run: RunDirectory, config: Config, as_json: bool) -> int:
    from hpcrun.slurm.launch.raw_script import not_in_the_script, raw_command

    line = raw_command(run, config)
    if as_json:
        from hpcrun.cli.output import print_json

        print_json({"run": str(run.path), "command": line})
        return 0
    for words in not_in_the_script(config):
        say_aside(f"hpcrun: {words}")
    say(f"hpcrun: {run.path} is ready; submit it with", line)
    return 0


def _say_finished(run: RunDirectory, result: dict[str, object], as_json: bool) -> int:
    """Report that there is nothing to continue, and the run's result."""
    from hpcrun.cli.output import print_json, print_result

    if as_json:
        print_json({"run": str(run.path), "result": result})
    else:
        say(f"hpcrun: {run.name} is finished already; for a new run choose another --name")
        print_result(run)
    return 0


def _show(plan: SubmissionPlan, as_json: bool) -> int:
    run, config, executor = plan.run, plan.config, plan.executor
    text = to_yaml(config)
    script = preview(run, config, executor, text)
    if as_json:
        from hpcrun.cli.output import print_json

        shown = {"run": str(run.path), "executor": executor, "script": script}
        print_json(shown | {"config": masked_values(config.model_dump(mode="json"))})
        return 0
    say("# dry run: nothing is submitted or written", f"# run directory: {run.path}")
    if plan.finished is not None:
        say("# it is finished already: nothing would be submitted")
    say(f"# executor: {executor}", "", *script.split("\n"), f"# {run.config}")
    if config.command:
        text = script_yaml(config)
    elif has_secrets(config):
        text = to_yaml(config, mask=True)
    say(*text.rstrip("\n").split("\n"))
    return 0


def _advice(run: RunDirectory, submitted: "SubmittedJob") -> list[str]:
    name = handle(run)
    return [
        f"hpcrun: {run.name} is job {submitted.job_id} ({submitted.executor})",
        f"  run directory  {run.path}",
        f"  follow         hpcrun logs -f {name}",
        f"  state          hpcrun status {name}",
        f"  stop           hpcrun cancel {name}",
        f"  continue       hpcrun resume {name}",
    ]
