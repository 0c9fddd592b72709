"""Where the training stands, for whoever has to say where it broke."""

from dataclasses import dataclass


@dataclass
class Position:
    """The step under computation; None before the first."""

    step: int | None = None
