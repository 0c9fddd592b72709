"""Follow the random generators of a recorded build; its draws do not happen.

After each recorded draw the generator gets a unique state, a mark. The state before the next draw then shows
the position of the generator: after an earlier draw, also through ``fork_rng`` and ``set_rng_state``, or at a
new state (``manual_seed``).
"""

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from hpcrun.train.deferred.tape import Draw, Unreplayable

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
