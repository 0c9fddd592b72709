"""Checks of ``job.sbatch_args`` and ``job.srun_args``."""

from collections.abc import Iterator

from hpcrun.api.submission.checks.concern import Concern, Submission
from hpcrun.config import Job, submit_options
from hpcrun.config.fields import time_seconds
from hpcrun.config.slurm_options import parse_options
from hpcrun.slurm.relied_options import BOTH, objection_to_variable, objections


def replaced_lines(submission: Submission) -> Iterator[Concern]:
    """Find options that replace a line on which hpcrun relies."""
    for program in BOTH:
        key = f"job.{program}_args"
        for one in objections(program, getattr(submission.config.job, f"{program}_args")):
            text = f"{one.option.text!r}: {one.text}"
            yield Concern(text, f"{key}.{one.option.item}", one.refused)


def variables_of_srun(submission: Submission) -> Iterator[Concern]:
    """Find variables in ``job.env`` that srun reads as options on which hpcrun relies."""
    for name, value in submission.config.job.env.items():
        text = objection_to_variable(name, value)
        if text is not None:
            yield Concern(text, f"job.env.{name}", refused=True)


def given_twice(submission: Submission) -> Iterator[Concern]:
    """Find options of sbatch that replace the value of a key that has an option of hpcrun."""
    job = submission.config.job
    keys = {option.sbatch: key for key, (option, _) in submit_options(Job).items() if option.sbatch}
    keys["cpus-per-task"] = "cpus_per_task"
    refused = {one.option.name for one in objections("sbatch", job.sbatch_args)}
    for option in parse_options("sbatch", job.sbatch_args):
        key = keys.get(option.name)
        if key is None or option.name in refused:
            continue
        own = getattr(job, key)
        if own and str(own) != (option.value or "True"):
            flag = f"--{key.replace('_', '-')} {option.value or ''}".rstrip()
            yield Concern(
                f"{option.text!r} replaces job.{key}={own}; give only one of them: {flag}",
                f"job.sbatch_args.{option.item}",
            )


def shortest_time(submission: Submission) -> Iterator[Concern]:
    """Find a ``--time-min`` with which Slurm may leave no time for the training."""
    job = submission.config.job
    for option in parse_options("sbatch", job.sbatch_args):
        if option.name != "time-min":
            continue
        try:
            least = time_seconds(option.value or "")
        except ValueError:
            # Slurm refuses it.
            continue
        if least <= job.signal_lead:
            yield Concern(
                f"{option.text!r}: Slurm may shorten the limit to {least} s, which is not longer than "
                f"job.signal_lead ({job.signal_lead} s), the warning before it; allow more time",
                f"job.sbatch_args.{option.item}",
                refused=True,
            )
