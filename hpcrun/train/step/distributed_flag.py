"""``is_distributed`` of a trainer: an attribute, a method, and a function of the class."""

from collections.abc import Callable
from typing import Any

from hpcrun.ranks.distributed import DistributedConfig


class YesOrNo:
    """A yes or no that is computed when it is read: as a truth value, or by a call."""

    def __init__(self, compute: Callable[[], bool]) -> None:
        self._compute = compute

    def __call__(self) -> bool:
        return self._compute()

    def __bool__(self) -> bool:
        return self._compute()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, bool | YesOrNo) and self._compute() == bool(other)

    def __hash__(self) -> int:
        return hash(self._compute())

    def __repr__(self) -> str:
        return repr(self._compute())


class DistributedFlag:
    """Descriptor: True if there is more than one rank.

    ``trainer.is_distributed`` and ``trainer.is_distributed()`` ask the trainer. The class, as in
    ``DistributedAMPTrainer.is_distributed()``, asks the process group, or without a group the launcher's
    variables; it raises ClusterError if these contradict each other.
    """

    def __get__(self, trainer: Any, _: type) -> YesOrNo:
        if trainer is None:
            return YesOrNo(lambda: DistributedConfig.from_env().world_size > 1)
        return YesOrNo(lambda: trainer.ranks > 1)
