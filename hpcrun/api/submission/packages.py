"""Check for missing packages at the submission, before the job waits in the queue."""

from importlib.util import find_spec

from hpcrun.config import Config
from hpcrun.errors import UserError


def require_packages(config: Config) -> None:
    """Raise UserError if a package for ``watch`` is not installed.

    Nothing is checked if the ranks may have other packages than this process: in a container, with another
    Python, or with modules that ``job.setup`` loads.
    """
    job, watch = config.job, config.watch
    if config.command or job.container or job.python or job.setup:
        return
    wanted = {"tensorboard": watch.tensorboard, "wandb": watch.wandb is not None}
    for package, asked in wanted.items():
        found = find_spec(package) if asked else None
        # A folder of that name, as W&B creates in its working folder, is not a package.
        if asked and (found is None or found.origin is None):
            raise UserError(
                f"watch.{package}: the package {package} is not installed here; `pip install {package}`, or "
                "omit the key"
            )
