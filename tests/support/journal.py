"""Short ways for tests to write and read the journal of a run by the tags of its events."""

from collections.abc import Iterator, Sequence
from typing import Any

from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.journal.events import KINDS, Event
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.state import State


def event(tag: str, attempt: Attempt | None = None, **fields: Any) -> Event:
    """Return an event of the kind with ``tag``."""
    kind = KINDS[tag]
    plain = ("time", "cause", "step")
    others = {
        name: fields.pop(name) for name in [*fields] if name not in (*plain, *kind.field_types)
    }
    return kind(attempt=attempt, **fields, **({"others": others} if others else {}))


def record_event(run: RunDirectory, tag: str, **fields: Any) -> None:
    """Append an event; ``job`` stands for the first attempt of that job."""
    job = fields.pop("job", None)
    attempt = {} if job is None else {"attempt": Attempt(job, 0)}
    Journal(run).append(event(tag, **attempt, **fields))


class Events(State, Sequence[Event]):
    """A state that is also the sequence of its events."""

    def __getitem__(self, index: Any) -> Any:
        return self.events[index]

    def __len__(self) -> int:
        return len(self.events)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __iter__(self) -> Iterator[Event]:
        return iter(self.events)


def read_events(run: RunDirectory) -> Events:
    """Return the state of ``run``, as the sequence of its events."""
    return Events(Journal(run).read().events)
