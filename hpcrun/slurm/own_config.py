"""The config of the run in a process of its job."""

import os
from collections.abc import Mapping

from hpcrun.config import Config, load_resolved
from hpcrun.run.directory import RunDirectory
from hpcrun.run.trust import SUBMITTED, own_config


def load_own(
    run: RunDirectory,
    environ: Mapping[str, str] = os.environ,
) -> Config:
    """Return the run's config after the check of its owner; no process of a job reads it in another way.

    Args:
        run: the run directory.
        environ: has the digest of the submitted config, if it is known.

    Raises:
        ForeignRun: the run is of another user, or is not what was submitted.
        UserError: the file is not a resolved config.
        OSError: the file cannot be read, for example because a file server does not answer.
    """
    return load_resolved(run.config, own_config(run, environ.get(SUBMITTED)))
