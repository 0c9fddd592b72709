"""The memory of a rank, in parts. Imports no torch."""

from collections.abc import Mapping
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Parts:
    """Bytes of a rank's tensors at the peak of a step.

    ``gathered``: weights that FSDP has gathered, and buffers of collectives; ``unsharded``: gradients that
    FSDP has not reduced yet; ``activations``: everything else, temporary results included.
    """

    weights: int
    optimizer: int
    average: int = 0
    gradients: int = 0
    unsharded: int = 0
    gathered: int = 0
    activations: int = 0

    def with_rest(self, peak: int) -> "Parts":
        """Return these parts with the rest of ``peak`` as activations."""
        named = (self.weights, self.optimizer, self.average, self.gradients)
        return replace(self, activations=peak - sum((*named, self.unsharded, self.gathered)))


@dataclass(frozen=True)
class Traced:
    """A fake run: its settings, as resolved, and its memory in bytes.

    ``peak``: of the tensors on the GPU; ``offloaded``: peak of the tensors in host memory instead.
    ``arithmetic``: the result of ``memory_estimate`` for weights, gradients and optimizer state.
    """

    parallel: str
    ranks: int
    micro_batch: int
    accumulation: int
    parameters: int
    peak: int
    offloaded: int
    parts: Parts
    arithmetic: Mapping[str, int]
