"""Values of a rank in a checkpoint: objects without ``state_dict()``, and what the next step needs.

Such objects are random generators, environments and replay memories. Their attributes go into the checkpoint,
and a resume fills the objects in place.
"""

import random
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hpcrun.checkpoint.state.object_state import ObjectStates
from hpcrun.errors import one_line
from hpcrun.storage.errors import CheckpointError

_PLAIN = (type(None), bool, int, float, complex, str, bytes, Tensor, np.ndarray, np.generic)
_FUNCTIONS = (type, type(len), type(lambda: None))


class OwnObject:
    """An object with attributes that are the state of this rank.

    Args:
        name: its name in the checkpoint and in messages.
        value: the object, or a list, tuple or dict with such objects.
        known: objects that the checkpoint holds already, such as the model.
    """

    def __init__(self, name: str, value: Any, known: Iterable[Any]) -> None:
        self.name, self.value = name, value
        ids = frozenset(map(id, known))
        self._states = ObjectStates(ids, torch.device("cpu"), complete=True)

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of the state as plain data.

        Raises:
            CheckpointError: a part cannot be saved; the text says where and why.
        """
        return {"value": self._states.take(self.value, self.name)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Fill the object in place.

        Raises:
            CheckpointError: the program has made another object.
        """
        try:
            self._states.put(self.value, state["value"])
        except CheckpointError:
            raise
        except Exception as error:  # the user's own code
            raise CheckpointError(
                f"{self.name}: does not accept its state ({one_line(error)}); create it as in the run that "
                "saved it, before hpcrun.resumable()"
            ) from error


def is_own(value: Any) -> bool:
    """Return True for an object that :class:`OwnObject` saves, also in a list, tuple or dict."""
    if isinstance(value, dict):
        return any(map(is_own, value.values()))
    if type(value) in (list, tuple):
        return any(map(is_own, value))
    if isinstance(value, deque | random.Random | np.random.Generator | np.random.RandomState):
        return True
    if isinstance(value, torch.Generator):
        return True
    if isinstance(value, (*_PLAIN, *_FUNCTIONS)) or hasattr(value, "state_dict"):
        return False
    return hasattr(value, "__dict__") or hasattr(type(value), "__slots__")


_DEVICE, _ARRAY = "\0device", "\0array"


def on_cpu(value: Any) -> Any:
    """Return ``value`` with a CPU copy of each tensor, with the type of its device; arrays are tensors."""
    if isinstance(value, torch.Tensor):
        return {_DEVICE: value.device.type, "tensor": value.detach().cpu()}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        return {_ARRAY: isinstance(value, np.ndarray), "tensor": torch.from_numpy(np.array(value))}
    if type(value) in (list, tuple):
        return type(value)(map(on_cpu, value))
    return {key: on_cpu(one) for key, one in value.items()} if type(value) is dict else value


def on_device(value: Any) -> Any:
    """Return what :func:`on_cpu` was given; the tensors are on the current device of their type."""
    if type(value) in (list, tuple):
        return type(value)(map(on_device, value))
    if type(value) is not dict:
        return value
    if _DEVICE in value:
        return value["tensor"].to(value[_DEVICE])
    if _ARRAY in value:
        array = value["tensor"].numpy()
        return array if value[_ARRAY] else array[()]
    return {key: on_device(one) for key, one in value.items()}
