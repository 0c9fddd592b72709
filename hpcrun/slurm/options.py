"""Options that a person gives to sbatch or srun, one per list item."""

from collections.abc import Sequence


def given_option(arguments: Sequence[str], long: str, short: str | None = None) -> str | None:
    """Return the value that the last of these options gives to ``--long`` or ``-short``.

    An option without a value has "". None: the option is not given. Slurm accepts the first letters of a
    long name.
    """
    found = None
    for argument in arguments:
        name, _, value = argument.replace("=", " ", 1).partition(" ")
        if name == f"--{long}" or (len(name) > 4 and f"--{long}".startswith(name)):
            found = value
        elif short and argument.startswith(f"-{short}") and not argument.startswith("--"):
            found = argument[2:].lstrip(" =")
    return found
