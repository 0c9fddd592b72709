"""The list of all checks of a submission."""

from collections.abc import Callable, Iterable, Sequence

from hpcrun.api.submission.checks import (
    add_ons,
    interpreter,
    launchers,
    limits,
    script_options,
    shell_text,
    slurm_options,
)
from hpcrun.api.submission.checks.concern import Concern, Submission
from hpcrun.config import ConfigError, Problem
from hpcrun.printing import say_aside

Check = Callable[[Submission], Iterable[Concern]]

CHECKS: Sequence[Check] = (
    slurm_options.replaced_lines,
    slurm_options.variables_of_srun,
    slurm_options.given_twice,
    slurm_options.shortest_time,
    launchers.nested_steps,
    launchers.nested_jobs,
    launchers.nested_mpi,
    launchers.separate_trainings,
    launchers.other_counts,
    shell_text.ignored_requests,
    shell_text.unexpanded_values,
    shell_text.carriage_returns,
    shell_text.hidden_exit_codes,
    script_options.options_of_hpcrun,
    interpreter.missing_packages,
    add_ons.missing_add_ons,
    limits.beyond_the_partition,
    limits.likely_units,
)
"""Functions that change nothing, in the order of their lines."""


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
    for check in CHECKS:
        for concern in check(submission):
            key = "" if concern.key == "command" else concern.key
            if concern.refused and not resumed:
                problems.append(Problem(where(concern.key), key, concern.text))
            else:
                say_aside(f"hpcrun: {key}{': ' if key else ''}{concern.text}")
    if problems:
        raise ConfigError(problems)
