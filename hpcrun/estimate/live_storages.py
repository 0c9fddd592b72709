"""LiveStorages: follow the memory of all tensors that exist, and its peak."""

import contextlib
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

_BLOCK = 512
"""Bytes in the smallest block of CUDA's allocator; it rounds every request up to a multiple."""


_Propagator: Any = ShardingPropagator
_PROPAGATE = "_propagate_tensor_meta_non_cached"


class LiveStorages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the storages of the results of all operations, until they are freed.

    ``live`` and ``peak`` are bytes. It counts fake and real tensors, once for all views of a storage, and no
    tensors on the meta device. Memory that a kernel allocates and frees internally is not counted.
    """

    def __init__(self, *, block: int = _BLOCK, device: str | None = None) -> None:
        """Start with nothing.

        Args:
            block: each storage counts as a multiple of so many bytes.
            device: the kind of device whose tensors count; None: all.
        """
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.peak = 0
        self._block, self._sizes = block, dict[int, int]()
        self._device = device
        self._counts = True
        self._plain: list[Any] = []

    def __enter__(self) -> "LiveStorages":
        resize, propagate = torch.UntypedStorage.resize_, getattr(_Propagator, _PROPAGATE)
        self._plain = [resize, propagate]

        # FSDP frees and allocates gathered weights by resizing a storage, which is not an operation.
        def resized(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, storage.nbytes())
            return result

        # Sharded tensors learn the shapes of results from fake tensors of the whole size.
        def propagated(*args: Any, **kwargs: Any) -> Any:
            with self.counting(False):
                return propagate(*args, **kwargs)

        changed: Any = torch.UntypedStorage
        changed.resize_ = resized
        setattr(_Propagator, _PROPAGATE, propagated)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        changed: Any = torch.UntypedStorage
        changed.resize_ = self._plain[0]
        setattr(_Propagator, _PROPAGATE, self._plain[1])

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        # Torch takes a sharded tensor apart, and calls again for its local tensor.
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        result = func(*args, **(kwargs or {}))
        if not self._counts:
            return result
        self.add(tree_iter(result))
        return result

    @contextlib.contextmanager
    def counting(self, counts: bool) -> Iterator[None]:
        """Count the results of operations in the block, or not."""
        before, self._counts = self._counts, counts
        try:
            yield
        finally:
            self._counts = before

    def add(self, values: Iterable[Any]) -> None:
        """Count the tensors among ``values``."""
        for value in values:
            if isinstance(value, Tensor) and value.layout == torch.strided:
                self._add(value)

    def start(self) -> None:
        """Reset the peak to the present memory."""
        self.peak = self.live

    def _add(self, tensor: Tensor) -> None:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if local.device.type == "meta" or self._device not in (None, local.device.type):
            return
        storage = local.untyped_storage()
        key = storage._cdata
        if key not in self._sizes:
            self._sizes[key] = 0
            weakref.finalize(storage, self._gone, key)
        self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        size = -(-size // self._block) * self._block
        if size == self._sizes[key]:
            return
        self.live += size - self._sizes[key]
        self._sizes[key] = size
        self.peak = max(self.peak, self.live)

    def _gone(self, key: int) -> None:
        size = self._sizes.pop(key, 0)
        self.live -= size


def storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Return the bytes of each storage of ``tensors``; of a sharded tensor, that of this rank's shard."""
    sizes: dict[int, int] = {}
    for tensor in tensors:
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        if isinstance(local, Tensor) and local.device.type != "meta":
            storage = local.untyped_storage()
            sizes[storage._cdata] = storage.nbytes()
    return sizes
