"""Packages that a config needs, missed before the job waits for its turn and not after."""

from importlib.util import find_spec

from hpcrun.config import Config
from hpcrun.errors import UserError


def require_packages(config: Config) -> None:
    """Raise UserError if what ``watch`` asks for is not installed.

    Nothing is asked where the ranks may have other packages than this process: in a container, with a
    Python of their own, or with what ``job.setup`` loads.
    """
    job, watch = config.job, config.watch
    if config.command or job.container or job.python or job.setup:
        return
    wanted = {"tensorboard": watch.tensorboard, "wandb": watch.wandb is not None}
    for package, asked in wanted.items():
        found = find_spec(package) if asked else None
        # A folder of that name, as W&B leaves where it has run, is no package.
        if asked and (found is None or found.origin is None):
            raise UserError(
                f"watch.{package}: the package {package} is not installed here; `pip install {package}`, or "
                "leave it out"
            )
