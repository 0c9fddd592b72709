"""Record a build: torch's calls go to fake tensors, which have a shape but no memory, and onto a tape.

Small tensors that depend on no random draw are also computed immediately, so that a build may read their
values (``torch.linspace(0, rate, layers).tolist()``). A build that reads any other value cannot be deferred.
"""

import gc
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from hpcrun.train.deferred.tape import (
    Call,
    Generators,
    Tape,
    Unreplayable,
    View,
    draws_random,
    new_storage,
)

_SMALL_BYTES = 1 << 19
"""Size of a tensor that is computed immediately."""

_OUTSIDE_BYTES = 1 << 30
"""Largest memory from outside the recording of which the recording keeps a copy."""

_STAYS = "_content_stays"

_EMPTY = {"empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided"}
_LIFTS = {"lift", "lift_fresh"}
# Calls that change the storage of a tensor, but no content.
_RELINKS = {torch.ops.aten.set_.source_Tensor, torch.ops.aten.set_.source_Tensor_storage_offset}
# Calls that set their first argument and do not read it.
_FILLS = {
    *("normal_", "uniform_", "exponential_", "log_normal_", "cauchy_", "geometric_", "random_"),
    *("zero_", "fill_", "copy_"),
}
_SIZED = {*_FILLS, "randn", "rand", "randint", "randperm"}
"""Draws that move a generator by a distance that depends only on the size of the result."""

_TRUNCATED = "_no_grad_trunc_normal_"
_truncated: Any = getattr(nn.init, _TRUNCATED)
_TRUNCATED_OPTIONS = 4
"""Mean, standard deviation, and the two limits."""

# Accesses to the content that bypass torch's dispatcher.
_READS = {"numpy", "__array__", "data_ptr", "__dlpack__", "share_memory_", "storage", "map_"}


def content_stays(tensor: Tensor) -> Tensor:
    """Promise that nothing changes the content of ``tensor``: a recording makes no copy."""
    vars(tensor)[_STAYS] = True
    return tensor


class _Fakes(FakeTensorMode):  # type: ignore[no-untyped-call]
    def __deepcopy__(self, memo: dict[int, Any]) -> "_Fakes":
        # A copied tensor belongs to the same recording.
        return self


class Recording(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records all calls in its ``with`` block; tensors made there have no memory.

    ``refused``: the first reason why the build cannot be replayed, if any: the code may have caught the
    exception and continued.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tape, self.generators, self.refused = Tape(), Generators(), ""
        self._fakes = _Fakes()
        self._numbers: dict[int, int] = {}
        self._alive: list[torch.UntypedStorage] = []
        self._made: list[weakref.ref[Tensor]] = []
        self._outside: set[int] = set()
        # Contents from outside by address.
        self._copies: dict[int, torch.UntypedStorage] = {}
        # Storages that calls on the tape read, and those that they set.
        self._read: set[int] = set()
        self._pending: set[int] = set()
        self._functions = _Functions(self)

    def __enter__(self) -> "Recording":
        setattr(nn.init, _TRUNCATED, self._draw_truncated)
        self._functions.__enter__()  # type: ignore[no-untyped-call]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._functions.__exit__(*error)  # type: ignore[no-untyped-call]
        setattr(nn.init, _TRUNCATED, _truncated)

    def refuse(self, reason: str) -> Unreplayable:
        """Note ``reason`` and return the exception to raise."""
        self.refused = self.refused or reason
        return Unreplayable(reason)

    def survivors(self) -> int:
        """Return the number of recorded tensors that the program still holds."""
        return sum(reference() is not None for reference in self._made)

    def materialize(self) -> bool:
        """Give recorded tensors that the program (a cache) still holds their contents; False: impossible."""
        gc.collect()
        held = [tensor for reference in self._made if (tensor := reference()) is not None]
        # Tensors with weak references cannot be swapped.
        self._made.clear()
        self._fakes.fake_tensor_converter.meta_converter.tensor_memo.clear()
        try:
            views = [self.view(tensor) for tensor in held]
            contents = dict[int, torch.UntypedStorage]()
            self.tape.replay({view.storage for view in views}, contents.__setitem__)
            while held:
                fake, view = held.pop(), views.pop()
                real = view.of(contents[view.storage])
                whole = nn.Parameter(real) if isinstance(fake, nn.Parameter) else real
                torch.utils.swap_tensors(fake, whole.requires_grad_(fake.requires_grad))  # type: ignore[no-untyped-call]
        except Exception:
            return False
        return True

    def owns(self, tensor: Tensor) -> bool:
        """Return True if ``tensor`` shows a storage of this recording that has no memory."""
        return tensor.untyped_storage()._cdata in self._numbers

    def view(self, tensor: Tensor) -> View:
        """Return what ``tensor``, a fake tensor, shows of its storage.

        Raises:
            Unreplayable: the tensor is not dense, or not on the CPU.
        """
        if not isinstance(tensor, FakeTensor) or tensor.layout is not torch.strided:
            raise self.refuse(f"it makes a {type(tensor).__name__} of layout {tensor.layout}")
        if tensor.device.type != "cpu":
            raise self.refuse(f"it makes a tensor on the device {tensor.device}")
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            raise self.refuse("it makes a quantized tensor, or a conjugate view")
        return View(
            self._number(tensor.untyped_storage()),
            tensor.dtype,
            tuple(tensor.shape),
            tuple(tensor.stride()),
            int(tensor.storage_offset()),
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name.partition("::")[2]
        stand_ins: dict[int, Tensor] = {}

        def stand_in(tensor: Tensor) -> Tensor:
            if isinstance(tensor, FakeTensor):
                return tensor
            # The program may change a tensor made from numbers in place.
            fake = self._stand_in(tensor, shared=name not in _LIFTS)
            stand_ins[id(fake)] = tensor
            return fake

        args, kwargs = tree_map_only(Tensor, stand_in, (args, dict(kwargs or {})))
        if name in _LIFTS:
            # A tensor made from numbers: no other code has it.
            self._outside.discard(self.view(args[0]).storage)
            return args[0]
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        before = [self.view(tensor) for tensor in inputs]
        try:
            # Without generators: fake tensors draw nothing, and torch's cache of calls would keep them alive.
            bare_args, bare_kwargs = _without_generators(args, kwargs)
            with self._fakes:
                out = func(*bare_args, **bare_kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            return self._from_values(func, args, kwargs)
        if func not in _RELINKS:
            if name == "set_" or name.startswith("resize"):
                raise self.refuse(f"it calls {name}")
            self._note(func, name, args, kwargs, before, out)
        # An in-place call returns its argument.
        return tree_map_only(Tensor, lambda tensor: stand_ins.get(id(tensor), tensor), out)

    def _note(
        self, func: Any, name: str, args: Any, kwargs: Any, before: list[View], out: Any
    ) -> None:
        """Run a call that fake tensors have gone through, or put it on the tape."""
        given = {view.storage for view in before}
        results = tuple(
            self._result(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_leaves(out)
        )
        creates = {view.storage for view in results if view is not None} - given
        targets = [self.view(tensor) for tensor in _mutated(func, args, kwargs)]
        writes = {view.storage for view in targets}
        if name in _EMPTY or not (writes or creates):
            return
        whole = name in _FILLS and bool(targets) and _covers(targets[0], self.tape.sizes)
        others = {view.storage for view in before[1:]} if whole else given
        overwrites = writes - others if whole else set()
        draws = draws_random(func, args, kwargs)
        arguments, options = tree_map_only(Tensor, self.view, (args, kwargs))
        # A replay sets the state of the default generator.
        arguments, options = _without_generators(arguments, options)
        call = Call(
            func,
            arguments,
            options,
            results,
            reads=frozenset(given - overwrites),
            writes=frozenset(writes),
            creates=frozenset(creates),
            overwrites=frozenset(overwrites),
            draw=self.generators.draw((args, kwargs), sized=name in _SIZED) if draws else None,
            default_dtype=torch.get_default_dtype(),
        )
        if writes & self._outside:
            # The program would find the change twice, or too late.
            raise self.refuse("it changes a tensor that it has not made")
        known = all(self._known(key) for key in call.reads)
        small = all(self.tape.sizes[key] <= _SMALL_BYTES for key in creates | overwrites)
        if known and small and not draws and not writes & (self._read | self._pending):
            self.tape.known.update(call.run(self._content))
            return
        self._append(call)

    def _append(self, call: Call) -> None:
        self._read |= call.reads
        self._pending |= call.writes | call.creates
        self.tape.calls.append(call)

    def _draw_truncated(self, tensor: Tensor, *options: Any, generator: Any = None) -> Tensor:
        """Record ``nn.init.trunc_normal_`` as one call: it draws again until all values are in range."""
        numbers, given = options[:_TRUNCATED_OPTIONS], options[_TRUNCATED_OPTIONS:]
        last = given[0] if given else generator
        if not isinstance(tensor, FakeTensor):
            done: Tensor = _truncated(tensor, *numbers, last)
            return done
        view = self.view(tensor)
        key = frozenset({view.storage})
        whole = key if _covers(view, self.tape.sizes) else frozenset[int]()
        if last is not None:
            self.generators.see(last)
        with _disable_current_modes():
            draw = self.generators.draw(last, sized=False)
        call = Call(
            _truncated,
            (view, *numbers, None),
            {},
            (view,),
            reads=key - whole,
            writes=key,
            creates=frozenset(),
            overwrites=whole,
            draw=draw,
            default_dtype=torch.get_default_dtype(),
        )
        if key & self._outside:
            raise self.refuse("it changes a tensor that it has not made")
        self._append(call)
        return tensor

    def _from_values(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run a call with a result that depends on values."""
        views = tree_map_only(Tensor, self.view, (args, kwargs))
        needed = {leaf.storage for leaf in tree_leaves(views) if isinstance(leaf, View)}
        if not all(self._known(key) for key in needed) or draws_random(func, args, kwargs):
            raise self.refuse(f"it reads the values of a tensor ({func._schema.name})")
        args, kwargs = tree_map_only(
            View, lambda view: view.of(self.tape.known[view.storage]), views
        )
        with torch.no_grad():
            out = func(*args, **kwargs)
        return tree_map_only(Tensor, self._stand_in, out)

    def _stand_in(self, real: Tensor, *, shared: bool = True) -> FakeTensor:
        """Return a fake tensor for ``real``, a tensor from outside the recording."""
        if real.layout is not torch.strided or real.device.type != "cpu":
            raise self.refuse(f"it uses a tensor of layout {real.layout} on {real.device}")
        fake = self._fakes.from_tensor(real.detach())
        key = self.view(fake).storage
        content = self._content_now(real, shared=shared)
        if not _same(self.tape.known.setdefault(key, content), content):
            raise self.refuse("it uses a tensor from outside again after a change")
        self._outside.add(key)
        self._made.append(weakref.ref(fake))
        return fake

    def _content_now(self, real: Tensor, *, shared: bool) -> torch.UntypedStorage:
        """Return a copy of the content of ``real``: the program may later load other values into the array.

        ``shared``: True if the copy serves all uses of this content.
        """
        storage = real.untyped_storage()
        if _STAYS in vars(real):
            return storage
        if storage.nbytes() > _OUTSIDE_BYTES:
            raise self.refuse(f"it uses a tensor of {storage.nbytes()} bytes that it has not made")
        last = self._copies.get(storage.data_ptr())
        if not shared or last is None or not _same(last, storage):
            last = storage.clone()  # type: ignore[no-untyped-call]
        if shared:
            self._copies[storage.data_ptr()] = last
        return last

    def _result(self, tensor: Tensor) -> View:
        self._made.append(weakref.ref(tensor))
        return self.view(tensor)

    def _known(self, key: int) -> bool:
        return key in self.tape.known and key not in self._pending

    def _content(self, key: int) -> torch.UntypedStorage:
        if key not in self.tape.known:
            self.tape.known[key] = new_storage(self.tape.sizes[key])
        return self.tape.known[key]

    def _number(self, storage: torch.UntypedStorage) -> int:
        if storage._cdata not in self._numbers:
            # Kept alive: torch gives the address of a freed storage to another one.
            self._alive.append(storage)
            number = len(self._numbers)
            self._numbers[storage._cdata] = number
            self.tape.sizes[number] = storage.nbytes()
        return self._numbers[storage._cdata]


class _Functions(TorchFunctionMode):
    """Intercepts calls that bypass torch's dispatcher: access to a tensor's content, copies, generators."""

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, torch.Generator):
                self._recording.generators.see(value)
        if args and isinstance(args[0], FakeTensor):
            if name in _READS:
                raise self._recording.refuse(f"it reads the values of a tensor ({name})")
            if name == "__deepcopy__":
                return _deep_copied(*args)
        return func(*args, **(kwargs or {}))


def _deep_copied(tensor: Tensor, memo: dict[int, Any]) -> Tensor:
    """Copy as ``copy.deepcopy`` does: a parameter without the attributes that a program has given to it."""
    if id(tensor) in memo:
        found: Tensor = memo[id(tensor)]
        return found
    copied = tensor.detach().clone(memory_format=torch.preserve_format)
    if isinstance(tensor, nn.Parameter):
        copied = nn.Parameter(copied, tensor.requires_grad)
    memo[id(tensor)] = copied
    return copied


def _same(one: torch.UntypedStorage, other: torch.UntypedStorage) -> bool:
    if one.data_ptr() == other.data_ptr() or one.nbytes() != other.nbytes():
        return one.nbytes() == other.nbytes()
    first, second = (
        View(0, torch.uint8, (storage.nbytes(),), (1,), 0).of(storage) for storage in (one, other)
    )
    return torch.equal(first, second)


def _mutated(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that the call changes."""
    found: list[Any] = []
    for place, argument in enumerate(func._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        # The schema of native_batch_norm does not say that it updates these.
        silent = argument.name.startswith("running_") and "batch_norm" in func._schema.name
        if silent or (argument.alias_info is not None and argument.alias_info.is_write):
            found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
    return found


def _without_generators(args: Any, kwargs: Any) -> Any:
    return tree_map_only(torch.Generator, lambda _: None, (args, kwargs))


def _covers(view: View, sizes: dict[int, int]) -> bool:
    """Return True if the tensor is all of its storage, each element once."""
    dense = 1
    for stride, size in sorted(zip(view.stride, view.size, strict=True)):
        if size != 1 and stride != dense:
            return False
        dense *= size
    return dense * view.dtype.itemsize == sizes[view.storage]
