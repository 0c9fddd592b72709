"""Comparison of the ranks' data: refuses ranks with the same samples, or with unequal numbers of batches.

Such a loop trains without an error: each rank computes the same gradient, or ranks wait in a collective for a
rank that has no batch.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import NamedTuple

from hpcrun.errors import UserError
from hpcrun.printing import say_aside
from hpcrun.ranks.collective import Ranks
from hpcrun.train.data.exact_loader import ExactLoader

_BITS = 32


class Pass(NamedTuple):
    """A pass over a loader on one rank, as the other ranks learn it.

    ``batches``: number of batches, at most the limit of the pass; None: unknown. ``sampler``: type of the
    sampler. ``replica``: number of replicas and own number of a ``DistributedSampler``. ``order``: hash of
    the first indices; None for an iterable dataset. ``samples``: hash of some samples, read with equal
    seeds, or of the first batch of an iterable dataset; None: unknown. ``whole``: number of samples if the
    pass reads every sample of the dataset in random order, else 0.
    """

    loader: str
    batches: int | None
    sampler: str
    replica: tuple[int, int] | None
    order: str | None
    samples: str | None
    whole: int


class RankData:
    """Comparison of the passes that the ranks train on: in the first step of a pass, or a step later.

    Only passes with a step are compared, and not those of a validation.

    Args:
        ranks: all ranks.
        loaders: the loaders of the training by name.
        same_samples: ranks may read the same samples.

    Attributes:
        due: this is the first step of the start, which compares in any case.
    """

    def __init__(
        self, ranks: Ranks, loaders: Mapping[str, ExactLoader], *, same_samples: bool
    ) -> None:
        self._ranks, self._loaders, self._same_samples = ranks, loaders, same_samples
        self._limits: dict[str, int | None] = {}
        self._begun: set[str] = set()  # not compared
        self._ahead: dict[str, bool] = {}  # False: the pass has ended
        self.due = self.active  # for a pass that ends before the second step
        for exact in loaders.values():
            exact.probes = self.active and not same_samples and not _is_distributed(exact, ranks)

    @property
    def active(self) -> bool:
        """True if there are several ranks and loaders."""
        return self._ranks.world_size > 1 and bool(self._loaders)

    def begin(self, name: str, limit: int | None) -> None:
        """Note the pass over the loader ``name`` that begins, with its most batches."""
        self._limits[name] = limit
        self._begun.add(name)
        self._ahead.pop(name, None)

    def uncounted(self, name: str) -> bool:
        """Return True if the number of batches in a pass over the loader is unknown."""
        return self.active and self._loaders[name].count() is None

    def note_ahead(self, name: str, more: bool) -> None:
        """Note, in a step, if the pass over a loader without a known length has another batch."""
        self._ahead[name] = more

    def notes(self, used: Mapping[str, int], *, over: bool) -> list[int]:
        """Return the numbers of this rank that the ranks exchange in a step.

        Args:
            used: number of batches of each pass that has begun and not ended.
            over: the training ends after this step.
        """
        begun = not self._begun.isdisjoint(used)
        if over or any(count == self._length(name) for name, count in used.items()):
            return [begun, 0, 0]
        ahead = {name: more for name, more in self._ahead.items() if name in used}
        ended = next((name for name, more in ahead.items() if not more), None)
        if ended is None:
            return [begun, bool(ahead), 0]
        return [begun, 0, (self._ranks.rank + 1 << _BITS) + used[ended]]

    def require_even(self, notes: Sequence[int], name: str) -> None:
        """Raise UserError on all ranks if a pass has ended on a rank, and other ranks have more batches.

        Args:
            notes: the largest :meth:`notes` of the ranks.
        """
        if notes and notes[1] and notes[2]:
            rank, batches = (notes[2] >> _BITS) - 1, notes[2] % (1 << _BITS)
            raise UserError(
                f"{name}: the pass has ended on rank {rank} after {batches} batches, and other ranks have "
                f"more, so they would wait for rank {rank}; {_even(batches)}"
            )

    @staticmethod
    def has_begun(notes: Sequence[int]) -> bool:
        """Return True if a rank has begun a pass, from the largest :meth:`notes` of the step before."""
        return bool(notes and notes[0])

    def step(self, used: Mapping[str, int], most: int | None) -> None:
        """Compare the passes that the ranks have begun. Collective.

        Args:
            used: as for :meth:`notes`, in this step.
            most: number of steps until the training ends, with this step; None: unlimited.

        Raises:
            UserError: the ranks read the same samples, or unequal numbers of batches. Raised on all ranks.
        """
        self.due = False
        mine = [self._pass(name) for name in used if name in self._begun]
        self._begun.difference_update(used)
        passes: list[list[Pass]] = self._ranks.gather(mine)
        require_equal_counts(
            passes, None if most is None else most + max(used.values(), default=1) - 1
        )
        if self._same_samples:
            return
        for same in zip(*passes, strict=False):
            if len({one.loader for one in same}) == 1:
                line = require_own_samples(same)
                if line and self._ranks.rank == 0:
                    say_aside(f"hpcrun: {line}")

    def _length(self, name: str) -> int | None:
        """Return the number of batches of a pass; None: unknown."""
        return _least((self._loaders[name].count(), self._limits.get(name)))

    def _pass(self, name: str) -> Pass:
        exact = self._loaders[name]
        return Pass(
            name,
            self._length(name),
            exact.sampler_name,
            exact.replica,
            exact.order,
            exact.samples,
            exact.whole,
        )


def require_equal_counts(passes: Sequence[Sequence[Pass]], most: int | None = None) -> None:
    """Raise UserError if the ranks have unequal numbers of batches; the training needs ``most`` at most.

    The passes of a rank are iterated together and end with the shortest of them.
    """
    counts = [_least(one.batches for one in of_rank) for of_rank in passes]
    known = [count for count in counts if count is not None]
    if len(known) < len(counts) or len(set(known)) == 1:
        return
    few, many = min(known), max(known)
    if most is not None and most <= few:
        return
    names = ", ".join(dict.fromkeys(one.loader for of_rank in passes for one in of_rank))
    raise UserError(
        f"{names}: rank {known.index(many)} has {many} batches in this pass, and rank {known.index(few)} has "
        f"{few}, so ranks would wait for a rank that has ended; {_even(few)}"
    )


def require_own_samples(same: Sequence[Pass]) -> str | None:
    """Raise UserError if ranks read the same samples; return a line if they read them in another order.

    Args:
        same: the pass of each rank over the same loader.
    """
    size, name, sampler = len(same), same[0].loader, same[0].sampler
    replicas = [one.replica for one in same]
    counts = {replica[0] for replica in replicas if replica is not None}
    declared = [replica[1] for replica in replicas if replica is not None]
    if len(declared) == size and counts != {size}:
        raise UserError(
            f"{name}: {sampler} has num_replicas={min(counts)}, and {size} ranks train, so samples would be "
            f"read several times or never; {_distributed(size)}"
        )
    if len(declared) == size:
        pair = _equal(declared)
        if pair is None:
            return None
        raise UserError(
            f"{name}: {sampler} has rank={declared[pair[0]]} on ranks {pair[0]} and {pair[1]}, so they would "
            f"compute the same gradients; {_distributed(size)}"
        )
    pair = _equal((one.order, one.samples) if one.order and one.samples else None for one in same)
    if pair is not None:
        raise UserError(
            f"{name}: ranks {pair[0]} and {pair[1]} read the same samples in the same order ({sampler}), so "
            f"they would compute the same gradients; {_distributed(size)}"
        )
    streams = [one.samples for one in same if one.order is None]
    if len(streams) == size and None not in streams and len(set(streams)) == 1:
        raise UserError(
            f"{name}: the first batch of the iterable dataset is the same on all {size} ranks, so they would "
            "compute the same gradients; give each rank its part of the data, such as "
            f"itertools.islice(samples, rank, None, {size}), or pass same_samples=True to "
            "hpcrun.resumable() if the ranks must read the same samples"
        )
    if same[0].whole and len({(one.whole, one.samples) for one in same}) == 1 and same[0].samples:
        return (
            f"{name}: each of the {size} ranks reads all {same[0].whole} samples in another order, so an "
            f"epoch has {size} times as many; {_distributed(size)}"
        )
    return None


def _is_distributed(exact: ExactLoader, ranks: Ranks) -> bool:
    return exact.replica == (ranks.world_size, ranks.rank)


def _equal(keys: Iterable[Hashable]) -> tuple[int, int] | None:
    """Return the numbers of the first two equal keys; None is equal to nothing."""
    found = list(keys)
    twice = next(
        (key for key, times in Counter(found).items() if key is not None and times > 1), None
    )
    if twice is None:
        return None
    first = found.index(twice)
    return first, found.index(twice, first + 1)


def _distributed(size: int) -> str:
    return (
        f"pass sampler=DistributedSampler(dataset) to the DataLoader, which has num_replicas={size} and the "
        "rank of each process, or same_samples=True to hpcrun.resumable() if this is intended (tensor "
        "parallelism)"
    )


def _even(few: int) -> str:
    return (
        "give all ranks as many batches: sampler=DistributedSampler(dataset) pads the data, and "
        f"state.batches(loader, limit={few}) ends all passes early"
    )


def _least(counts: Iterable[int | None]) -> int | None:
    return min((count for count in counts if count is not None), default=None)
