"""A process group that is a tree of small gloo groups: what few ranks of a large world are connected to.

A gloo group connects every rank with every other one. Here a collective goes up the tree to rank 0 and its
result comes down again, so that a rank has connections to its neighbors only, and leaders to a few more.
"""

import itertools
import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C import _distributed_c10d

from hpcrun.control.parts import Part, collected, dealt_out, handed_down, make_parts, reduced

# Torch's stubs do not know the kinds of reductions.
_c10d: Any = _distributed_c10d

_REMEMBERED = 32
"""Collectives that are kept by name, for the diagnosis of a hang."""

_LONGEST_END = 60.0
"""Seconds that a rank waits at its end for collectives that were begun."""

_REDUCTIONS: dict[Any, Callable[[Tensor], Tensor]] = {
    _c10d.ReduceOp.SUM: lambda stacked: stacked.sum(0, dtype=stacked.dtype),
    _c10d.ReduceOp.MIN: lambda stacked: stacked.amin(0),
    _c10d.ReduceOp.MAX: lambda stacked: stacked.amax(0),
}


class TreeGroup(_c10d.ProcessGroup):  # type: ignore[misc]  # its base is Any
    """The collectives that decisions and gathered objects need, on CPU tensors; no others.

    ``torch.distributed``'s functions take it as ``group``. A thread carries the collectives out in the
    order in which they were begun, so that an asynchronous collective runs while training computes.

    Where a collective fails on a rank (a peer has gone, or the time limit is over), the rank closes its
    connections. Its peers then fail in turn, up and down the tree, and no rank waits for its own limit.

    Args:
        store: where the ranks find each other; no other group uses it.
        timeout: how long a rank waits for its peers in one level of a collective.
        fan_out: the most members of one small group.
    """

    def __init__(
        self, store: Any, rank: int, size: int, timeout: timedelta, *, fan_out: int
    ) -> None:
        super().__init__(rank, size)
        self._me, self._size = rank, size
        self._names = {"name": "", "desc": ""}
        self.options = _Limit(timeout)
        self._begun: deque[tuple[int, str]] = deque(maxlen=_REMEMBERED)
        self._numbers = itertools.count(1)
        self._parts = make_parts(store, rank, size, timeout, fan_out)
        self._work: queue.SimpleQueue[_Pending | None] = queue.SimpleQueue()
        self._thread = threading.Thread(
            target=_carry_out, args=(self._work, self._parts), name="hpcrun-control", daemon=True
        )
        self._thread.start()

    # What torch.distributed asks of every group. For its own kinds of groups C++ code answers.

    supports_splitting = False

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")]

    def _get_backend(self, device: torch.device) -> "TreeGroup":
        return self

    @property
    def group_name(self) -> str:
        """Torch's name of this group."""
        return self._names["name"]

    @property
    def group_desc(self) -> str:
        """The purpose of this group."""
        return self._names["desc"]

    def _set_group_name(self, name: str) -> None:
        self._names["name"] = name

    def _set_group_desc(self, description: str) -> None:
        self._names["desc"] = description

    def _set_default_timeout(self, limit: timedelta) -> None:
        self.options._timeout = limit
        for part in list(self._parts):
            part.set_timeout(limit)

    def begun(self) -> list[tuple[int, str]]:
        """The latest collectives that this rank has begun, by number, such as ``(43, "all_reduce of 1")``."""
        return list(self._begun)

    def allreduce(self, tensors: Any, opts: Any = None) -> "_Pending":
        """The sum, minimum or maximum of every rank's tensor, in place on every rank."""
        (tensor,) = _listed(tensors)
        reduction = _reduction(opts)

        def run(parts: list[Part]) -> None:
            total = reduced(parts, tensor.detach().reshape(-1).clone(), reduction)
            tensor.copy_(handed_down(parts, total).view_as(tensor))

        return self._begin(f"all_reduce of {tensor.numel()}", run)

    def broadcast(self, tensors: Any, opts: Any = None) -> "_Pending":
        """One rank's tensor, in place on every rank."""
        (tensor,) = _listed(tensors)
        root = 0 if opts is None else opts.rootRank

        def run(parts: list[Part]) -> None:
            value = _bytes(tensor)
            if root:
                # Up to rank 0 first: what every other rank adds leaves the bytes as they are.
                given = value if self._me == root else torch.zeros_like(value)
                value = reduced(parts, given, _REDUCTIONS[_c10d.ReduceOp.MAX])
            _put(tensor, handed_down(parts, value))

        return self._begin(f"broadcast of {tensor.numel()}", run)

    def allgather(self, outputs: Any, inputs: Any, opts: Any = None) -> "_Pending":
        """Every rank's tensor on every rank, in the order of the ranks; all are of one size."""
        (tensor,), (into,) = _listed(inputs), outputs

        def run(parts: list[Part]) -> None:
            mine = _bytes(tensor)
            found = collected(parts, mine, self._size)
            if found is None:
                found = torch.empty(self._size * mine.numel(), dtype=torch.uint8)
            _deal(into, handed_down(parts, found))

        return self._begin(f"all_gather of {tensor.numel()}", run)

    def gather(self, outputs: Any, inputs: Any, opts: Any = None) -> "_Pending":
        """Every rank's tensor on one rank, in the order of the ranks; all are of one size."""
        root = 0 if opts is None else opts.rootRank
        (tensor,) = _listed(inputs)
        if root:
            blank = [torch.empty_like(tensor) for _ in range(self._size)]
            return self.allgather([outputs[0] if self._me == root else blank], inputs)

        def run(parts: list[Part]) -> None:
            found = collected(parts, _bytes(tensor), self._size)
            if found is not None:
                _deal(outputs[0], found)

        return self._begin(f"gather of {tensor.numel()}", run)

    def scatter(self, outputs: Any, inputs: Any, opts: Any = None) -> "_Pending":
        """Each rank's tensor of those that rank 0 gives; all are of one size.

        Raises:
            ValueError: another rank than 0 is to give them.
        """
        if opts is not None and opts.rootRank:
            raise ValueError(f"a control group scatters from rank 0, not from {opts.rootRank}")
        (tensor,) = _listed(outputs)

        def run(parts: list[Part]) -> None:
            blocks = [_bytes(piece) for piece in inputs[0]] if inputs else []
            block = torch.cat(blocks) if blocks else torch.empty(0, dtype=torch.uint8)
            _put(tensor, dealt_out(parts, block, tensor.numel() * tensor.element_size()))

        return self._begin(f"scatter of {tensor.numel()}", run)

    def barrier(self, opts: Any = None) -> "_Pending":
        """Done when every rank has begun it."""

        def run(parts: list[Part]) -> None:
            value = torch.zeros(1, dtype=torch.uint8)
            handed_down(parts, reduced(parts, value, _REDUCTIONS[_c10d.ReduceOp.MAX]))

        return self._begin("barrier", run)

    def shutdown(self) -> None:
        """Close the connections, once the collectives that were begun are over.

        After a minute the rank stops waiting: a peer that neither answers nor ends must not hold back the
        end of this rank. The connections then close with the process.
        """
        self._work.put(None)
        self._thread.join(_LONGEST_END)

    def abort(self) -> None:
        """As :meth:`shutdown`: a collective that was begun ends by its limit."""
        self.shutdown()

    def getBackendName(self) -> str:
        """The name that torch prints."""
        return "hpcrun_tree"

    def _begin(self, name: str, run: "Callable[[list[Part]], None]") -> "_Pending":
        self._begun.append((next(self._numbers), name))
        pending = _Pending(run)
        self._work.put(pending)
        return pending


class _Pending:
    """A collective that was begun: the part of torch's ``Work`` that callers use."""

    def __init__(self, run: "Callable[[list[Part]], None]") -> None:
        self._run = run
        self._over = threading.Event()
        self._error: BaseException | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when the tensors hold the result; raises RuntimeError when a peer has gone or is late."""
        if not self._over.wait(None if timeout is None else timeout.total_seconds()):
            raise RuntimeError(f"a collective has not ended within {timeout}")
        if self._error is not None:
            raise RuntimeError(str(self._error)) from self._error
        return True

    def is_completed(self) -> bool:
        """True when :meth:`wait` would not block."""
        return self._over.is_set()

    def carry_out(self, parts: "list[Part]") -> BaseException | None:
        """Run, and return what it raised."""
        try:
            self._run(parts)
        except BaseException as error:  # who waits raises it
            self.fail(error)
            return error
        self._over.set()
        return None

    def fail(self, error: BaseException) -> None:
        """Have :meth:`wait` raise ``error``."""
        self._error = error
        self._over.set()


@dataclass
class _Limit:
    """The part of gloo's options that is read: how long a collective may take."""

    _timeout: timedelta


def _carry_out(work: "queue.SimpleQueue[_Pending | None]", parts: list[Part]) -> None:
    """Run what is put into ``work``, one at a time; close the connections at its end or first failure."""
    broken: BaseException | None = None
    while (pending := work.get()) is not None:
        if broken is not None:
            pending.fail(broken)
            continue
        broken = pending.carry_out(parts)
        if broken is not None:
            # Frames hold references to groups; a group closes its connections with the last reference.
            broken = broken.with_traceback(None)
            parts.clear()
        del pending
    parts.clear()


def _deal(into: list[Tensor], found: Tensor) -> None:
    for tensor, piece in zip(into, found.chunk(len(into)), strict=True):
        _put(tensor, piece)


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).clone()


def _put(tensor: Tensor, found: Tensor) -> None:
    tensor.detach().copy_(found.clone().view(tensor.dtype).view_as(tensor))


def _listed(tensors: Any) -> list[Tensor]:
    """Torch gives a list of one tensor, because a group of GPUs may take several."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def _reduction(opts: Any) -> Callable[[Tensor], Tensor]:
    wanted = _c10d.ReduceOp.SUM if opts is None else opts.reduceOp
    for kind, reduction in _REDUCTIONS.items():
        if wanted == kind:
            return reduction
    raise ValueError(f"a control group reduces by SUM, MIN or MAX, not by {wanted}")
