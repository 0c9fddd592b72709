"""The passes of a loop over its loaders: what was handed out, and where a resume continues."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.train.data.exact_loader import ExactLoader, next_pass
from hpcrun.train.data.lookahead import END, Lookahead
from hpcrun.train.own_loop.rank_data import RankData


class Passes:
    """The passes of a training over its loaders.

    Args:
        loaders: by name.
        is_over: returns True if the training has made all its steps.
        require_last: raises UserError if something has changed after the last step.

    Attributes:
        loaders: the argument.
        open: a batch was handed out after the last step.
    """

    _data: RankData
    _notes: Callable[..., list[int]]

    def __init__(
        self,
        loaders: dict[str, ExactLoader],
        *,
        is_over: Callable[[], bool],
        require_last: Callable[[], None],
    ) -> None:
        self.loaders, self._is_over, self._require_last = loaders, is_over, require_last
        self._begun: set[str] = set()  # the loaders with a pass in this epoch
        self._left: set[str] = set()  # the loaders with a pass that has begun and not ended
        self._ended = False  # a pass has ended after the last step
        self.open = False
        self._rest: dict[str, Lookahead] = {}

    def compare(self, data: RankData, notes: Callable[..., list[int]]) -> None:
        """Compare the passes of the ranks by ``data``; ``notes`` returns what the ranks have exchanged."""
        self._data, self._notes = data, notes

    def begin_epoch(self) -> None:
        """Allow a pass over each loader again."""
        self._begun = set()

    def step(self) -> None:
        """Note that the loop has made a step."""
        self.open = self._ended = False

    def used(self) -> dict[str, int]:
        """Return the numbers of batches of the passes in progress."""
        return {name: self.position(name) for name in self.loaders if name in self._left}

    def notes(self, used: Mapping[str, int]) -> list[int]:
        """Return the notes of this rank for the other ranks; none on a single rank.

        Args:
            used: the result of :meth:`used` in this step.
        """
        if not self._data.active:
            return []
        for name in used:
            if self._data.uncounted(name) and not self._is_over():
                # A batch ahead, so that no rank begins a step that another rank does not make.
                self._data.note_ahead(name, self._rest[name].has_more())
        return self._data.notes(used, over=self._is_over())

    def name_of(self, loader: Any) -> str:
        """Return the name of a loader, or of the only loader for None; raises UserError."""
        for name, one in self.loaders.items():
            if loader is one.loader or (loader is None and len(self.loaders) == 1):
                return name
        raise UserError(
            "state.batches(): give it a loader that hpcrun.resumable(loader=…) was given; it has "
            f"{len(self.loaders)}"
        )

    def position(self, name: str) -> int:
        """Return the number of batches of the current pass that were handed out."""
        return self.loaders[name].batches - self._ahead(name)

    def begin(self, name: str, limit: int | None, epoch: int) -> bool:
        """Begin the next pass over a loader; return True if it is the rest of a saved pass.

        Args:
            name: the name of the loader.
            limit: the most batches of the pass; None: all.
            epoch: number of the epoch.

        Raises:
            UserError: the loader had a pass in this epoch, or the loop has left its pass before its end.
        """
        resumed = self.loaders[name].resumed
        if limit is not None and limit < 1:
            raise UserError(f"state.batches(limit={limit}): give at least 1 batch, or None for all")
        if not resumed and name in self._begun:
            raise UserError(
                f"state.batches(): a second pass over {name} in epoch {epoch}; a resume could not know "
                "which pass to continue, so make each pass an epoch: for epoch in state.epochs(…), which "
                "also takes max_steps="
            )
        if not resumed and name in self._left:
            done = self.position(name)
            raise UserError(
                f"state.batches(): the loop has left the pass over {name} before its end, after "
                f"{done} batches, where a resume would continue; in place of break or "
                f"islice use state.batches(loader, limit={done}), or "
                "state.epochs(…, max_steps=…)"
            )
        self._begun.add(name)
        self._rest[name] = Lookahead(iter(self.loaders[name]))
        self._data.begin(name, limit)
        return resumed

    def batches(self, name: str, limit: int | None) -> Iterator[Any]:
        """Yield the batches of the pass that has begun, up to ``limit``; raises UserError."""
        rest = self._rest[name]
        self._left.add(name)
        first = True
        try:
            while not self._is_over():
                if limit is not None and self.position(name) >= limit:
                    break
                if rest.looked and not self.open:
                    self._data.require_even(self._notes(wait=True), name)
                batch = next(rest, END)
                if batch is END:
                    break
                if not first and not self.open:
                    self._require_last()
                first, self.open = False, True
                yield batch
            self._ended = True
        finally:
            if self._ended:  # this pass, or another pass in the same zip()
                self._left.discard(name)

    def require_batches(self, ranks: Ranks) -> None:
        """Raise UserError if this rank had no batch in an epoch without a step, and is one of several."""
        empty = [name for name in self._begun if not self.loaders[name].batches]
        if ranks.world_size > 1 and empty:
            raise UserError(
                f"{empty[0]}: rank {ranks.rank} has no batch, so the other ranks would wait for it; give "
                f"the {ranks.world_size} ranks at least as many samples: sampler=DistributedSampler(dataset) "
                "pads the data; or start fewer ranks"
            )

    def places(self, epoch: int, *, in_epoch: bool) -> dict[str, Any]:
        """Return the position of each loader; its next pass if it had none in this epoch.

        Args:
            epoch: number of the epoch.
            in_epoch: the training is in an epoch, and not between two.
        """
        found = {}
        for name, one in self.loaders.items():
            place = one.state_dict(self.position(name))
            ended = not in_epoch or name not in self._begun
            found[name] = next_pass(place) if (epoch or in_epoch) and ended else place
        return found

    def require_same_loaders(self, saved: Mapping[str, Any]) -> None:
        """Raise UserError if the checkpoint has other loaders."""
        if saved.keys() != self.loaders.keys():
            raise UserError(
                f"the checkpoint has the loaders {sorted(saved)}, and this training has "
                f"{sorted(self.loaders)}; pass the same loaders with the same names"
            )

    def load(self, saved: Mapping[str, Any]) -> None:
        """Continue at the result of :meth:`places`."""
        for name, one in self.loaders.items():
            one.load_state_dict(saved[name])
        self._begun = {name for name, one in self.loaders.items() if one.resumed}

    def _ahead(self, name: str) -> int:
        return len(self._rest[name].ahead) if name in self._rest else 0
