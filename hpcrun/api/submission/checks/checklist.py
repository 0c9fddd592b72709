"""The list of all checks of a submission."""

from collections.abc import Callable, Iterable, Iterator

from hpcrun.api.submission.checks.concern import Concern, Submission
from hpcrun.config import ConfigError, Problem
from hpcrun.printing import say_aside

Check = Callable[[Submission], Iterable[Concern]]


def checks_for(submission: Submission) -> Iterator[Check]:
    """Yield the checks that may find something in ``submission``, in the order of their lines.

    Checks are functions that change nothing. The modules of the others are not imported.
    """
    config = submission.config
    job, command = config.job, config.command
    if job.sbatch_args or job.srun_args or job.env:
        from hpcrun.api.submission.checks import slurm_options

        yield slurm_options.replaced_lines
        yield slurm_options.variables_of_srun
        yield slurm_options.given_twice
        yield slurm_options.shortest_time
    if command:
        from hpcrun.api.submission.checks import launchers

        yield launchers.nested_steps
        yield launchers.nested_jobs
        yield launchers.nested_mpi
        yield launchers.separate_trainings
        yield launchers.other_counts
    if command or job.env:
        from hpcrun.api.submission.checks import shell_text

        yield shell_text.ignored_requests
        yield shell_text.unexpanded_values
        yield shell_text.carriage_returns
        yield shell_text.hidden_exit_codes
    if command:
        from hpcrun.api.submission.checks import interpreter, script_options

        yield script_options.options_of_hpcrun
        yield interpreter.missing_packages
    if config.watch.sinks or config.job.node_checks or config.restarts.strategies:
        from hpcrun.api.submission.checks import add_ons

        yield add_ons.missing_add_ons
    if submission.offer is not None or job.mem is not None or job.time is not None:
        from hpcrun.api.submission.checks import limits

        yield limits.beyond_the_partition
        yield limits.likely_units


def check_submission(
    submission: Submission, where: Callable[[str], str], *, resumed: bool = False
) -> None:
    """Print the lines of all checks of ``submission``.

    Args:
        where: the function of :func:`hpcrun.config.locate`.
        resumed: the run was submitted like this before, so nothing is refused.

    Raises:
        ConfigError: a check refuses the submission; it has a line for each reason.
    """
    problems = []
    for check in checks_for(submission):
        for concern in check(submission):
            key = "" if concern.key == "command" else concern.key
            if concern.refused and not resumed:
                problems.append(Problem(where(concern.key), key, concern.text))
            else:
                say_aside(f"hpcrun: {key}{': ' if key else ''}{concern.text}")
    if problems:
        raise ConfigError(problems)
