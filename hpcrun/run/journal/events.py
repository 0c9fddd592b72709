"""The kinds of events in the log of a run, one class each.

A line of the log has the keys ``time`` (Unix seconds), ``event`` (the tag of the class), the numbers of the
attempt (``job``, ``restart``, ``in_place``), ``cause``, ``step``, and the fields of the class. A field that a
line does not have is None. An event writes only the fields that it was made with.
"""

import time as clock
import types
from collections.abc import Iterable, Mapping
from enum import Enum
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, Union, get_args, get_origin

from hpcrun.run.attempt import Attempt, numbers_of

if TYPE_CHECKING:
    from typing_extensions import dataclass_transform
else:
    # Only type checkers need it.
    def dataclass_transform(**_):
        return lambda cls: cls


class Cause(str, Enum):
    """The cause of an attempt's end."""

    FINISHED = "finished"
    PREEMPTION = "preemption"
    TIME_LIMIT = "time-limit"
    CONTINUED = "continued"
    NODE_FAILURE = "node-failure"
    CRASH = "crash"
    HANG = "hang"
    CANCELLED = "cancelled"
    BAD_INPUT = "bad-input"
    SAVE_FAILED = "save-failed"
    EXHAUSTED = "exhausted"


# The fields of all events.
_OF_ALL = frozenset({"time", "attempt", "cause", "step", "others"})


# dataclasses would compile a constructor for each class: 20 ms for all kinds, at every import.
@dataclass_transform(kw_only_default=True, frozen_default=True)
class _Record:
    """A record with the fields of its class; only the given fields are kept, the others have a default."""

    # The fields that the class adds to those of all events, with the types of their values; None: any type.
    field_types: ClassVar[Mapping[str, tuple[type, ...] | None]] = {}

    def __init_subclass__(cls) -> None:
        hints = {name: hint for name, hint in cls.__annotations__.items() if name not in _OF_ALL}
        own = {name: _types_of(hint) for name, hint in hints.items() if name != "tag"}
        cls.field_types = {**cls.field_types, **own}

    def __init__(self, **values: Any) -> None:
        unknown = values.keys() - self.field_types.keys() - _OF_ALL
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        self.__dict__.update({"time": round(clock.time(), 3), **values})

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"{name}: an event does not change")

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash((type(self), vars(self).get("time")))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({values})"

    def has(self, field: str) -> bool:
        """Return True if the record was made with ``field``, which may be None."""
        return field in vars(self)


class Event(_Record):
    """An event of any kind.

    ``time``: Unix seconds, the present by default. ``attempt``: None for an event of the whole run.
    ``cause``: of an end, a stop or a failure. ``others``: keys of the line that the class does not know, or
    with a value of another type.
    """

    tag: ClassVar[str] = ""

    time: float = 0.0
    attempt: Attempt | None = None
    cause: str | None = None
    step: int | None = None
    others: Mapping[str, Any] = types.MappingProxyType({})

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if cls.tag:
            KINDS[cls.tag] = cls

    @property
    def known(self) -> dict[str, Any]:
        """The fields that the class adds, as far as the event has them."""
        return {key: value for key, value in vars(self).items() if key in self.field_types}

    @property
    def own(self) -> dict[str, Any]:
        """The fields of the line beside its time, attempt, cause and step."""
        return {**self.known, **self.others}


KINDS: dict[str, type[Event]] = {}
"""The class of each tag."""


def _types_of(hint: Any) -> tuple[type, ...] | None:
    """Return the types that JSON gives for the annotation of a field; None: any."""
    if hint is Any:
        return None
    parts = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    found: list[type] = []
    for part in parts:
        plain = get_origin(part) or part
        found += [float, int] if plain is float else [plain]
    return tuple(found)


class Unknown(Event):
    """An event of a newer version. ``tag`` is that of the line."""


class Submitted(Event):
    """A job has been submitted. ``nodes``: a number, or a range such as ``2-4``.

    ``name``: of the job. ``continues``: the job that this job replaces, because Slurm does not requeue it.
    """

    tag = "submitted"
    executor: str | None = None
    nodes: int | str | None = None
    gpus: int | str | None = None
    cluster: str | None = None
    name: str | None = None
    continues: str | None = None


class Prepared(Event):
    """The supervisor lets an attempt begin; its ranks have not begun."""

    tag = "prepared"
    executor: str | None = None
    cluster: str | None = None


class Opened(Event):
    """The ranks of an attempt have begun. ``script``: they run a program that reports no steps by itself.

    ``host``, ``pid``: of rank 0. ``hosts``: the nodes, as Slurm writes a list. ``slurm_step``: the number
    of the ranks' step.
    """

    tag = "opened"
    host: str | None = None
    cluster: str | None = None
    script: bool | None = None
    executor: str | None = None
    pid: int | None = None
    ranks: int | None = None
    nodes: int | None = None
    hosts: str | None = None
    slurm_step: int | None = None


class Started(Event):
    """The training has begun at ``step``, or a script's program.

    ``on_disk``: the newest step on disk, if the state is from memory; ``snapshot``: its time (Unix seconds).
    """

    tag = "started"
    ranks: int | None = None
    nodes: int | None = None
    accumulation: int | None = None
    parallel: Any = None
    on_disk: int | None = None
    snapshot: float | None = None

    @property
    def committed(self) -> int | None:
        """The newest step on disk; None without a checkpoint.

        A restart in a job may begin at a later step, which only the memory of the nodes has.
        """
        return (self.on_disk if self.has("on_disk") else self.step) or None


class Stepped(Event):
    """A script has reported its first step."""

    tag = "stepped"


class Saved(Event):
    """A checkpoint is committed. ``seconds``: the training stood still; ``found``: reported after a crash."""

    tag = "saved"
    seconds: float | None = None
    written_seconds: float | None = None
    bytes: int | None = None
    host_memory: Any = None
    found: bool | None = None


class SaveFailed(Event):
    """A checkpoint could not be written."""

    tag = "save-failed"
    reason: str | None = None


class Stopped(Event):
    """All ranks have stopped at an agreed step, or a script has ended on a signal; ``cause`` says why.

    ``hosts``: the slow nodes that another node is to replace. Of a script: ``exit_code`` (null: it had not
    started), ``killed`` (it died of the signal), ``done`` (its work was finished).
    """

    tag = "stopped"
    committed: bool | None = None
    exit_code: int | None = None
    killed: bool | None = None
    done: bool | None = None
    hosts: list[str] | None = None


class Nonfinite(Event):
    """The gradients of a step were not finite."""

    tag = "nonfinite"
    in_a_row: int | None = None
    ranks: Any = None
    samples: Any = None


class Suspended(Event):
    """Slurm has suspended the job for ``seconds``; reported when it continues."""

    tag = "suspended"
    seconds: float | None = None


class Slow(Event):
    """A node has become slow, see :mod:`hpcrun.run.slow_nodes`."""

    tag = "slow"
    host: str | None = None
    rank: int | None = None
    ratio: float | None = None


class SlowOver(Event):
    """A node is no longer slow."""

    tag = "slow-over"
    host: str | None = None


class Trained(Event):
    """All steps are done; the report is left."""

    tag = "trained"


class BadInput(Event):
    """A rank has refused its input. ``kind``: of the error; ``certain``: all nodes have it."""

    tag = "bad-input"
    reason: str | None = None
    kind: str | None = None
    host: str | None = None
    certain: bool | None = None


class AttemptRefused(Event):
    """The restart policy has refused the attempt."""

    tag = "refused"
    reason: str | None = None


class Finished(Event):
    """The training has finished. ``early``: before its last step."""

    tag = "finished"
    early: bool | None = None


class Ended(Event):
    """An attempt has ended with ``cause``; ``step``: the newest commit, or that of a crash.

    ``last_seen``: last sign of an attempt that recorded no end (Unix seconds). ``crash``: the exception of
    a crash and its place, or its signal. ``failure``: the same, if only the program can be the cause.
    ``passing``: a file system, a network or a node may be the cause. ``unsaved``: a script with reported
    steps has no save.
    """

    tag = "ended"
    exit_code: int | None = None
    reason: str | None = None
    host: str | None = None
    restart_allowed: bool | None = None
    decision: str | None = None
    failure: str | None = None
    crash: str | None = None
    passing: bool | None = None
    unsaved: bool | None = None
    last_seen: float | None = None


class RequeueFailed(Event):
    """Slurm has not requeued, continued or cancelled the job; ``cause`` names the request."""

    tag = "requeue-failed"
    reason: str | None = None


class Excluded(Event):
    """The next start excludes nodes that failed too often."""

    tag = "excluded"
    hosts: list[str] | None = None


class NodeLost(Event):
    """A node of the step is lost."""

    tag = "node-lost"
    host: str | None = None
    reason: str | None = None


class Replaced(Event):
    """A spare node ``by`` replaces the node ``lost``; without ``by``, the step continues without it."""

    tag = "replaced"
    lost: str | None = None
    by: str | None = None
    reason: str | None = None


class SpareLost(Event):
    """A node that no step used is lost."""

    tag = "spare-lost"
    host: str | None = None
    reason: str | None = None


class SpareUnfit(Event):
    """A node that no step used has failed its checks."""

    tag = "spare-unfit"
    host: str | None = None
    reason: str | None = None


class CancelRequested(Event):
    """A person has cancelled the job."""

    tag = "cancelled"


class Pruned(Event):
    """A search ends the run: its job is cancelled next."""

    tag = "pruned"


class Preempted(Event):
    """A person has sent the signal of a preemption."""

    tag = "preempted"


class CopiesFound(Event):
    """Copies of a script did the same work, see ``reason``."""

    tag = "copies"
    reason: str | None = None


class FoundOccupied(Event):
    """The attempt ``refused`` did not begin, because the job ``holder`` had the run."""

    tag = "occupied"
    refused: str | None = None
    holder: str | None = None


class GivenUp(Event):
    """No job continues the run, although the policy allows a restart."""

    tag = "given-up"
    reason: str | None = None


def to_line(event: Event) -> dict[str, Any]:
    """Return ``event`` as a line of the log."""
    line: dict[str, Any] = {"time": event.time, "event": event.tag}
    if event.attempt is not None:
        line |= numbers_of(event.attempt)
    if event.cause is not None:
        line["cause"] = event.cause
    if event.step is not None:
        line["step"] = event.step
    return line | event.own


def to_event(line: Mapping[str, Any]) -> Event | None:
    """Return the event of a line; None if its envelope (time, event, attempt, cause, step) is damaged."""
    rest = dict(line)
    try:
        tag, when = str(rest.pop("event")), float(rest.pop("time", 0.0))
        values: dict[str, Any] = {"time": when}
        if "job" in rest:
            restart, in_place = int(rest.pop("restart", 0)), int(rest.pop("in_place", 0))
            values["attempt"] = _attempt(str(rest.pop("job")), restart, in_place)
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    cause, step = rest.pop("cause", None), rest.pop("step", None)
    if not isinstance(cause, str | None) or not isinstance(step, int | None):
        return None
    if cause is not None:
        values["cause"] = cause
    if step is not None:
        values["step"] = step
    kind = KINDS.get(tag, Unknown)
    others: dict[str, Any] = {}
    for name, value in rest.items():
        allowed = kind.field_types.get(name, ())
        fits = allowed is None or value is None or isinstance(value, allowed)
        (values if fits and name in kind.field_types else others)[name] = value
    if others:
        values["others"] = others
    event = kind.__new__(kind)
    event.__dict__.update(values)
    if kind is Unknown:
        event.__dict__["tag"] = tag
    return event


@lru_cache(maxsize=1024)
def _attempt(job: str, restart: int, in_place: int) -> Attempt:
    return Attempt(job, restart, in_place)


def to_events(lines: Iterable[Mapping[str, Any]]) -> list[Event]:
    """Return the events of ``lines``, in their order; damaged lines are skipped."""
    found = map(to_event, lines)
    return [event for event in found if event is not None]
