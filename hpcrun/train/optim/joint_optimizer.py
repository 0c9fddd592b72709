"""JointOptimizer: several optimizers of one model as a single optimizer."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

from torch.optim import Optimizer


class JointOptimizer(Optimizer):
    """The groups and the state of several optimizers, which step one after the other.

    The optimizers keep their state in one mapping and their options in the same groups as this object. So
    the schedule, clipping, the loss scale and checkpoints see one optimizer with more groups. A checkpoint
    of it loads into the same optimizers only, since their groups differ.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """``optimizers``: of different parameters; none may be used elsewhere afterwards.

        Raises:
            ValueError: two optimizers have the same parameter.
        """
        self.optimizers = list(optimizers)
        self._complete = False
        super().__init__([group for each in self.optimizers for group in each.param_groups], {})
        self._complete = True
        state: defaultdict[Any, Any] = defaultdict(dict)
        for each in self.optimizers:
            state.update(each.state)
        self.state = state
        self._connect()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of each optimizer; a closure is not supported."""
        for each in self.optimizers:
            each.step()

    def lines(self) -> Iterator[str]:
        """Yield a line for the user on the parameters of each optimizer."""
        for each in self.optimizers:
            held = [parameter for group in each.param_groups for parameter in group["params"]]
            values = sum(parameter.numel() for parameter in held)
            yield f"{type(each).__name__}: {len(held)} tensors with {values:,} weights"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: add the group to one of the optimizers, before they are joined."""
        if self._complete:
            raise ValueError("add a group to one of the optimizers, before they are joined")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch calls this method in load_state_dict(), with new groups and a new state.
        super().__setstate__(state)
        self._connect()

    def _connect(self) -> None:
        """Give each optimizer its groups and the common state."""
        first = 0
        for each in self.optimizers:
            last = first + len(each.param_groups)
            each.__setstate__({"state": self.state, "param_groups": self.param_groups[first:last]})
            first = last
