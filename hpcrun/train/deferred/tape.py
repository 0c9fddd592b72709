"""Tape of a recorded build: torch's calls in order, with storages in place of tensors, and their replay.

A replay runs only the calls that the wanted contents depend on. A generator is a sequence, so a draw also
needs the draws before it. A draw without a wanted result (``nn.Linear`` draws weights, and then the model
draws them again) runs on scratch memory.

After each recorded draw the generator gets a unique state, a mark. The state before the next draw then shows
the position of the generator: after an earlier draw, also through ``fork_rng`` and ``set_rng_state``, or at a
new state (``manual_seed``).
"""

import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

Contents = dict[int, torch.UntypedStorage]
"""Storages by number."""


def new_storage(size: int) -> torch.UntypedStorage:
    """Return uninitialized host memory of ``size`` bytes."""
    kind: Any = torch.UntypedStorage
    storage: torch.UntypedStorage = kind(size)
    return storage


class Unreplayable(Exception):
    """The build cannot be deferred; the text is the reason."""


@dataclass(frozen=True)
class View:
    """A tensor of a recorded call: the part of a storage that the tensor shows; ``offset`` in elements."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, storage: torch.UntypedStorage) -> Tensor:
        """Return the tensor over ``storage``."""
        empty: Any = torch.empty(0, dtype=self.dtype)
        tensor: Tensor = empty.set_(storage, self.offset, self.size, self.stride)
        return tensor


@dataclass(frozen=True)
class Draw:
    """A call's use of a random generator.

    ``start``: the state of the generator, or the number of the previous draw of this generator. ``sized``:
    True if the size of the result alone decides how far the generator moves.
    """

    number: int
    start: int | Tensor
    sized: bool


@dataclass(frozen=True)
class Call:
    """A recorded call; ``arguments`` and ``options`` have a :class:`View` for each tensor.

    ``results``: None for a result that is no tensor. ``reads``, ``writes`` and ``creates`` are storages; a
    storage in ``overwrites`` is set as a whole and not read. ``default_dtype``: of torch at the recording.
    """

    function: Any
    arguments: tuple[Any, ...]
    options: Mapping[str, Any]
    results: tuple[View | None, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    creates: frozenset[int]
    overwrites: frozenset[int]
    draw: Draw | None = None
    default_dtype: torch.dtype = torch.float32

    def run(self, content: Callable[[int], torch.UntypedStorage]) -> Contents:
        """Run the call on the storages that ``content`` returns; return the storages that it creates.

        Raises:
            Unreplayable: a result has another shape or type than at the recording.
        """
        arguments, options = tree_map_only(
            View, lambda view: view.of(content(view.storage)), (self.arguments, dict(self.options))
        )
        made: Contents = {}
        kept = torch.get_default_dtype()
        torch.set_default_dtype(self.default_dtype)
        try:
            leaves = tree_leaves(self.function(*arguments, **options))
        finally:
            torch.set_default_dtype(kept)
        for expected, result in zip(self.results, leaves, strict=True):
            if expected is None or expected.storage not in self.creates:
                continue
            if (tuple(result.shape), result.dtype) != (expected.size, expected.dtype):
                raise Unreplayable(f"{self.function} has another result than at the recording")
            layout = tuple(result.stride()), result.storage_offset()
            if layout == (expected.stride, expected.offset):
                made[expected.storage] = result.untyped_storage()
            else:
                # Fake tensors do not know the layout of every kernel's result.
                extent = 1 + sum(
                    (size - 1) * stride
                    for size, stride in zip(expected.size, expected.stride, strict=True)
                )
                relaid = new_storage((expected.offset + extent) * expected.dtype.itemsize)
                expected.of(relaid).copy_(result)
                made[expected.storage] = relaid
        return made


@dataclass
class Tape:
    """The recorded calls, the sizes of all storages in bytes, and the contents that are already known."""

    calls: list[Call] = field(default_factory=list)
    sizes: dict[int, int] = field(default_factory=dict)
    known: Contents = field(default_factory=dict)

    def replay(
        self,
        wanted: Collection[int],
        deliver: Callable[[int, torch.UntypedStorage], None],
        after: Collection[int] = (),
        advance: Callable[[], None] | None = None,
    ) -> dict[int, Tensor]:
        """Compute the storages ``wanted``; pass each to ``deliver`` as soon as its content is final.

        A storage is freed after its last use. Torch's generators stay as they are.

        Args:
            after: numbers of draws.
            advance: called after each call.

        Returns:
            The state of the generator after each draw in ``after``.
        """
        chosen = self._choose(wanted, after)
        kept_states = {*after, *_starts(chosen)}
        states: dict[int, Tensor] = {}
        contents: Contents = {}
        kept = torch.get_rng_state()
        try:
            with torch.no_grad():
                for key in self._final(wanted, chosen):
                    deliver(key, self.known[key])
                for (call, useful), done in zip(chosen, _last_uses(chosen), strict=True):
                    if call.draw is not None:
                        start = call.draw.start
                        torch.set_rng_state(states[start] if isinstance(start, int) else start)
                    self._run(call, contents if useful else None)
                    if call.draw is not None and call.draw.number in kept_states:
                        states[call.draw.number] = torch.get_rng_state()
                    for key in done:
                        content = contents.pop(key, None)
                        if content is not None and key in wanted:
                            deliver(key, content)
                        # The next call must not find the memory still in use.
                        del content
                    if advance is not None:
                        advance()
        finally:
            torch.set_rng_state(kept)
        return {number: states[number] for number in after}

    def order(self, wanted: Collection[int]) -> list[int]:
        """Return ``wanted`` in the order in which :meth:`replay` delivers them."""
        chosen = self._choose(wanted, ())
        late = [key for done in _last_uses(chosen) for key in done if key in wanted]
        final = self._final(wanted, chosen)
        return final + [key for key in late if key not in final]

    def clear(self) -> None:
        """Free what the tape holds: the recording is not needed any more."""
        self.calls.clear()
        self.known.clear()

    def written(self, key: int) -> bool:
        """Return True if the content of the storage is known, or a call sets it at least in part."""
        return key in self.known or any(
            key in call.writes or key in call.creates for call in self.calls
        )

    def _final(self, wanted: Collection[int], chosen: Sequence[tuple[Call, bool]]) -> list[int]:
        """Return the storages that were computed at the recording, and that no call changes."""
        changed = {key for call, useful in chosen if useful for key in call.writes | call.creates}
        return sorted(set(wanted) - changed)

    def _choose(self, wanted: Collection[int], after: Collection[int]) -> list[tuple[Call, bool]]:
        """Return the calls to run, in order; False for a draw with an unused result."""
        live, needed = set(wanted), set(after)
        chosen: list[tuple[Call, bool]] = []
        for call in reversed(self.calls):
            useful = bool(live & (call.writes | call.creates))
            draw = call.draw
            if not useful and (draw is None or draw.number not in needed):
                continue
            if draw is not None and isinstance(draw.start, int):
                needed.add(draw.start)
            # Other draws read values to know how much to draw.
            useful = useful or draw is None or not draw.sized
            if useful:
                live -= call.creates | call.overwrites
                live |= call.reads
            chosen.append((call, useful))
        return chosen[::-1]

    def _run(self, call: Call, contents: Contents | None) -> None:
        """Run ``call`` on ``contents``; None: on scratch memory."""
        used: Contents = {} if contents is None else contents

        def content(key: int) -> torch.UntypedStorage:
            known: Any = None if contents is None else self.known.get(key)
            if key not in used and known is not None and key not in call.writes:
                # Not kept in `used`: a call that writes takes a copy, so that a later replay is right.
                shared: torch.UntypedStorage = known
                return shared
            if key not in used:
                used[key] = new_storage(self.sizes[key]) if known is None else known.clone()
            return used[key]

        used.update(call.run(content))


def _starts(chosen: Sequence[tuple[Call, bool]]) -> Iterator[int]:
    """Yield the draws after which other draws begin."""
    for call, _ in chosen:
        if call.draw is not None and isinstance(call.draw.start, int):
            yield call.draw.start


def _last_uses(chosen: Sequence[tuple[Call, bool]]) -> list[list[int]]:
    """Return for each call the storages that no later call uses."""
    last = {
        key: place
        for place, (call, useful) in enumerate(chosen)
        if useful
        for key in call.reads | call.writes | call.creates
    }
    done: list[list[int]] = [[] for _ in chosen]
    for key in sorted(last):
        done[last[key]].append(key)
    return done


def draws_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if a call of torch's dispatcher draws random numbers."""
    return torch.Tag.nondeterministic_seeded in func.tags or any(
        isinstance(leaf, torch.Generator) for leaf in tree_leaves((args, kwargs))
    )


_FIRST_SEED = 0x9E3779B9
# torch's state begins with the initial seed, which a mark keeps.
_SEED_BYTES = 8


class Generators:
    """The generators of a build: their draws, and their marks."""

    def __init__(self) -> None:
        self._marks: dict[bytes, int] = {}
        # Each generator with its state before the build.
        self._seen: dict[int, tuple[weakref.ref[torch.Generator], Tensor]] = {}

    def see(self, generator: torch.Generator) -> None:
        """Note a generator of the program, before its first draw.

        A recorded call has another Python object for the generator. The object of the program is seen only
        when the program passes it to a function.
        """
        known = self._seen.get(id(generator))
        if known is None or known[0]() is not generator:
            self._seen[id(generator)] = weakref.ref(generator), generator.get_state()

    def draw(self, arguments: Any, *, sized: bool) -> Draw:
        """Record a draw; ``arguments``: of the call, with its generator if it names one.

        Raises:
            Unreplayable: the generator is not on the CPU.
        """
        given = [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, torch.Generator)]
        if not given:
            self.see(torch.default_generator)
        generator = given[0] if given else torch.default_generator
        if generator.device.type != "cpu":
            raise Unreplayable(f"it draws random numbers on the device {generator.device}")
        state = generator.get_state()
        number = len(self._marks)
        mark = torch.Generator().manual_seed(_FIRST_SEED + number).get_state()
        mark[:_SEED_BYTES] = state[:_SEED_BYTES]
        generator.set_state(mark)
        start = self._marks.get(_key(state))
        self._marks[_key(mark)] = number
        return Draw(number, state if start is None else start, sized)

    def living(self) -> list[tuple[torch.Generator, Tensor]]:
        """Return the generators that the program still holds, with their states before the build."""
        held = [(seen(), state) for seen, state in self._seen.values()]
        return [(generator, state) for generator, state in held if generator is not None]

    def rewind(self) -> None:
        """Set the generators to their states before the build."""
        for generator, state in self.living():
            generator.set_state(state)

    def marked(self) -> list[tuple[torch.Generator, int]]:
        """Return the generators that the program still holds and whose state is a mark, with their draw."""
        return [
            (generator, self._marks[key])
            for generator, _ in self.living()
            if (key := _key(generator.get_state())) in self._marks
        ]


def _key(state: Tensor) -> bytes:
    return state.numpy().tobytes()
