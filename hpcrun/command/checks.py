"""Checks of the command after ``--``, before anything is made or submitted."""

from pathlib import Path

from hpcrun.command.missing import require_there
from hpcrun.command.rank_starters import require_script, separate_trainings
from hpcrun.config import Config
from hpcrun.printing import say_aside


def check_command(config: Config, folder: Path) -> None:
    """Check the command of ``config``, if it has one, and warn where it would become several trainings.

    Args:
        folder: where the ranks will work.

    Raises:
        UserError: its script is not there, or is nothing that the launcher can start.
    """
    job = config.job
    if not config.command:
        return
    if job.launcher is not None:
        require_script(job.launcher, config.command, folder)
    # The files of a container are not known here.
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
