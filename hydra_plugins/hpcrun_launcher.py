"""The plugin ``hydra/launcher=hpcrun``: hydra takes plugins only from classes of this package."""

from hpcrun.integrations import hydra


class HpcrunLauncher(hydra.HpcrunLauncher):
    """See :class:`hpcrun.integrations.hydra.HpcrunLauncher`."""
