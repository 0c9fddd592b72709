"""Draws after a deferred build: they must follow those of the build, which have not happened."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hpcrun.train.deferred.build import Deferred
from hpcrun.train.deferred.tape import draws_random


class LaterDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context in which the first draw computes the state that a normal build leaves.

    That takes the time of all draws of the build, so it happens only if something draws from this state: not
    after ``manual_seed``, but within ``fork_rng``, and with a generator that took over the state.
    """

    def __init__(self, deferred: Deferred, advance: Callable[[], None]) -> None:
        """Follow the draws of ``deferred``; ``advance`` is called after each draw that is computed."""
        super().__init__()  # type: ignore[no-untyped-call]
        self._deferred, self._advance = deferred, advance
        self._after: Tensor | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if draws_random(func, args, kwargs):
            leaves = tree_leaves((args, kwargs))
            given = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
            generator = given[0] if given else torch.default_generator
            if self._deferred.left(generator):
                if self._after is None:
                    self._after = self._deferred.state_after(self._advance)
                generator.set_state(self._after)
        return func(*args, **(kwargs or {}))
