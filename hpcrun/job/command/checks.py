"""Checks of the command after ``--``, before anything is created or submitted."""

from pathlib import Path

from hpcrun.config import Config
from hpcrun.printing import say_aside


def check_command(config: Config, folder: Path) -> None:
    """Check the command of ``config``, if any, and warn if it would start several separate trainings.

    Args:
        folder: the ranks' working folder.

    Raises:
        UserError: its script does not exist, or the launcher cannot start it.
    """
    job = config.job
    if not config.command:
        return
    from hpcrun.job.command.missing import require_there
    from hpcrun.job.command.rank_starters import require_script, separate_trainings

    if job.launcher is not None:
        require_script(job.launcher, config.command, folder)
    # The files of a container are unknown here.
    if not job.container:
        require_there(
            config.command,
            folder,
            launched=job.launcher is not None,
            here=job.executor in ("local", "debug"),
            prepared_by=[*job.setup, *job.node_setup],
        )
    line = None
    if job.launcher is None:
        line = separate_trainings(config.command, folder, nodes=job.nodes, tasks=job.tasks_on_node)
    if line is not None:
        say_aside(f"hpcrun: {line}")
