"""A submission as the checks see it, and what a check finds."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from hpcrun.config import Config

if TYPE_CHECKING:
    from hpcrun.slurm.nodes import Offer


@dataclass(frozen=True)
class Submission:
    """A submission before anything is written.

    Attributes:
        config: the resolved config.
        folder: the working folder of the ranks.
        offer: the nodes and partitions of the cluster; None if they are not known.
    """

    config: Config
    folder: Path = field(default_factory=Path.cwd)
    offer: "Offer | None" = None

    @property
    def copies(self) -> int:
        """Number of tasks that start the command, with the largest number of nodes."""
        return self.config.job.world_size


@dataclass(frozen=True)
class Concern:
    """Something in a submission that would not do what its user wants.

    Attributes:
        text: what, and the remedy.
        key: the dotted key of the value; ``command`` for the command.
        refused: True if no sound submission can have it; False for a line.
    """

    text: str
    key: str = "command"
    refused: bool = False
