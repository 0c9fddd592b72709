"""Build a model on the meta device so that its weights can be computed later, with the same bits."""

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves, tree_map

from hpcrun.errors import UserError
from hpcrun.run.endings import place_of
from hpcrun.train.deferred.recording import Recording
from hpcrun.train.deferred.tape import Generators, Tape, Unreplayable, View

_CONTAINERS = (list, tuple, dict)
_OF_MODULES = {"_parameters", "_buffers", "_modules"}


@dataclass(frozen=True)
class DeferredParameter:
    """A parameter without content: its name, its place in the recorded build, its owners and attributes."""

    name: str
    view: View
    owners: tuple[tuple[nn.Module, str], ...]


@dataclass(frozen=True)
class Deferred:
    """A model on the meta device, except for its buffers, and the recording of its build.

    ``reached``: the last draw of torch's default generator; None if the build has drawn nothing since the
    last seed.
    """

    model: nn.Module
    parameters: tuple[DeferredParameter, ...]
    tape: Tape
    reached: int | None
    state: Tensor
    generators: Generators

    def order(self) -> list[str]:
        """Return the names of the parameters in the order of :meth:`compute`."""
        places = self._by_storage()
        return [each.name for key in self.tape.order(places) for each in places[key]]

    def compute(self, take: Callable[[str, Tensor], None]) -> None:
        """Compute all parameters, and pass each with its name to ``take``; only a few exist at a time."""
        places = self._by_storage()

        def deliver(key: int, content: torch.UntypedStorage) -> None:
            for each in places[key]:
                take(each.name, each.view.of(content))

        self.tape.replay(places, deliver)

    def left(self, generator: torch.Generator) -> bool:
        """Return True if ``generator`` has the state in which this build left torch's default generator."""
        if self.reached is None or generator.device.type != "cpu":
            return False
        return torch.equal(generator.get_state(), self.state)

    def state_after(self, advance: Callable[[], None]) -> Tensor:
        """Return the state of torch's default generator after a normal build.

        Takes the time of all draws; ``advance`` is called after each.
        """
        assert self.reached is not None
        states = self.tape.replay((), _nowhere, after=[self.reached], advance=advance)
        return states[self.reached]

    def rebuild(self, make: Callable[[], nn.Module]) -> nn.Module:
        """Return a model with weights from ``make``, which must start as the recorded build did.

        The generators of the build stay as they are.
        """
        now = [(generator, generator.get_state()) for generator, _ in self.generators.living()]
        self.generators.rewind()
        try:
            return make()
        finally:
            for generator, state in now:
                generator.set_state(state)

    def _by_storage(self) -> dict[int, list[DeferredParameter]]:
        places: dict[int, list[DeferredParameter]] = {}
        for each in self.parameters:
            places.setdefault(each.view.storage, []).append(each)
        return places


def build_deferred(make: Callable[[], nn.Module]) -> Deferred:
    """Run ``make`` without memory for the model's parameters.

    Buffers, and tensors in other attributes of modules, are computed: they are small, and code may read them.
    Python's and numpy's generators move as in a normal build; torch's default generator: see
    :class:`~hpcrun.train.deferred.fill.LaterDraws`.

    Raises:
        Unreplayable: the parameters cannot be computed later with the same bits. The generators are as they
            were before, and what the program still holds of the build has its values.
        UserError: a tensor that the program still holds cannot get values.
    """
    recording = Recording()
    try:
        return _record(recording, make)
    except UserError:
        recording.generators.rewind()
        raise
    except Unreplayable as error:
        reason = str(error)
    # Outside the handler, because the frames of an exception keep the objects of the build alive.
    recording.generators.rewind()
    if not recording.materialize():
        raise UserError(
            f"fsdp.deferred_init: the build of the model cannot be deferred ({reason}), and a tensor that it "
            "leaves behind has no memory; set fsdp.deferred_init=false"
        )
    raise Unreplayable(reason)


def _record(recording: Recording, make: Callable[[], nn.Module]) -> Deferred:
    try:
        with recording:
            model = make()
    except UserError:
        raise
    except Exception as error:
        where, _ = place_of(error)
        reason = recording.refused or f"{type(error).__name__}: {error}".splitlines()[0]
        raise Unreplayable(f"{reason}{f' at {where}' if where else ''}") from None
    if recording.refused:
        raise Unreplayable(recording.refused)
    if not isinstance(model, nn.Module):
        raise Unreplayable("it returns no module")
    parameters = _Swap(recording, model).swap()
    reached = _finish_generators(recording)
    if recording.survivors():
        gc.collect()
    if recording.survivors():
        raise Unreplayable(
            f"{recording.survivors()} of its tensors are held outside parameters and buffers"
        )
    return Deferred(
        model, parameters, recording.tape, reached, torch.get_rng_state(), recording.generators
    )


def _finish_generators(recording: Recording) -> int | None:
    """Set the remaining generators to their true states; return the draw of the default generator."""
    marked = recording.generators.marked()
    default = [number for generator, number in marked if generator is torch.default_generator]
    others = [each for each in marked if each[0] is not torch.default_generator]
    states = recording.tape.replay((), _nowhere, after=[number for _, number in others])
    for generator, number in others:
        generator.set_state(states[number])
    return default[0] if default else None


@dataclass
class _Swap:
    """Puts meta parameters and computed buffers in place of a recorded model's fake tensors."""

    recording: Recording
    model: nn.Module
    _new: dict[int, Any] = field(default_factory=dict)

    def swap(self) -> tuple[DeferredParameter, ...]:
        """Replace all fake tensors of the model; return its parameters without content.

        Raises:
            Unreplayable: a tensor of the model has no content in the recording.
        """
        parameters = self._parameters()
        deferred = {each.view.storage for each in parameters}
        computed = self._others(deferred)
        tape, contents = self.recording.tape, dict[int, torch.UntypedStorage]()
        tape.replay({view.storage for view in computed.values()}, contents.__setitem__)
        for key, view in computed.items():
            self._new[key] = view.of(contents[view.storage])
        for module in self.model.modules():
            for name, value in list(module._buffers.items()):
                if id(value) in self._new:
                    module._buffers[name] = self._new[id(value)]
            for name, value in _attributes(module):
                if any(id(leaf) in self._new for leaf in tree_leaves(value)):
                    changed = tree_map(lambda leaf: self._new.get(id(leaf), leaf), value)
                    module.__dict__[name] = changed
            for name, value in list(module._parameters.items()):
                if id(value) in self._new:
                    module._parameters[name] = self._new[id(value)]
        return parameters

    def _parameters(self) -> tuple[DeferredParameter, ...]:
        plain = {*vars(self._blank())}
        owners: dict[int, list[tuple[nn.Module, str]]] = {}
        named: dict[int, tuple[str, Tensor]] = {}
        for path, module in self.model.named_modules():
            for name, value in module._parameters.items():
                if value is not None and self._is_fake(value, full := _join(path, name)):
                    owners.setdefault(id(value), []).append((module, name))
                    named.setdefault(id(value), (full, value))
        found = []
        for key, (full, fake) in named.items():
            hooks = fake._backward_hooks or getattr(fake, "_post_accumulate_grad_hooks", None)
            if hooks or not fake.is_leaf or fake.grad is not None:
                raise Unreplayable(f"{full} has a hook or a gradient")
            view = self._view(full, fake)
            meta = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device="meta")
            new = nn.Parameter(meta, requires_grad=fake.requires_grad)
            vars(new).update({k: v for k, v in vars(fake).items() if k not in plain})
            self._new[key] = new
            found.append(DeferredParameter(full, view, tuple(owners[key])))
        return tuple(found)

    def _others(self, deferred: set[int]) -> dict[int, View]:
        """Return the views of the fake tensors in buffers and attributes, by ``id``."""
        found: dict[int, View] = {}
        for path, module in self.model.named_modules():
            for name, value in [*module._buffers.items(), *_attributes(module)]:
                for leaf in tree_leaves(value):
                    full = _join(path, name)
                    if id(leaf) in self._new or not isinstance(leaf, Tensor):
                        continue
                    if self._is_fake(leaf, full):
                        found[id(leaf)] = self._view(full, leaf)
                        if found[id(leaf)].storage in deferred:
                            raise Unreplayable(f"{full} shares the memory of a parameter")
                        if leaf.grad_fn is not None:
                            raise Unreplayable(f"{full} has a graph of gradients")
        return found

    def _view(self, name: str, fake: Tensor) -> View:
        view = self.recording.view(fake)
        if not self.recording.tape.written(view.storage):
            raise Unreplayable(f"{name} is uninitialized memory")
        return view

    def _is_fake(self, value: Tensor, name: str) -> bool:
        if type(value) is FakeTensor:
            return True
        if isinstance(value, FakeTensor) or value.is_meta or self.recording.owns(value):
            raise Unreplayable(f"{name} is a {type(value).__name__} on the device {value.device}")
        return False

    def _blank(self) -> nn.Parameter:
        with self.recording:
            return nn.Parameter(torch.empty(1))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes of ``module`` that are tensors or hold tensors."""
    for name, value in list(vars(module).items()):
        if name not in _OF_MODULES and (
            isinstance(value, Tensor)
            or (
                type(value) in _CONTAINERS
                and any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))
            )
        ):
            yield name, value


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _nowhere(_: int, __: torch.UntypedStorage) -> None:
    """Ignore the storage: this replay computes only the states of generators."""
