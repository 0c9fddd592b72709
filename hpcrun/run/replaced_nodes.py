"""The nodes that a job has lost or replaced, for people."""

from collections.abc import Iterator, Sequence

from hpcrun.run.events import Event


def replaced_now(events: Sequence[Event]) -> list[str]:
    """Return a line for each node that the newest start of the newest job has replaced or lost."""
    started = [event.attempt for event in events if event.attempt is not None]
    if not started:
        return []
    mine = (event for event in events if event.attempt and event.attempt.is_of_start(started[-1]))
    return [line for event in mine for line in _lines(event)]


def _lines(event: Event) -> Iterator[str]:
    facts = event.fields
    host, by, reason = (
        facts.get("host"),
        facts.get("by"),
        facts.get("reason") or "no reason is recorded",
    )
    if event.what == "replaced":
        place = f"was replaced by {by}" if by else "is used no more"
        yield f"{facts.get('lost')} {place}: {reason}"
    elif event.what == "spare-lost":
        yield f"the spare node {host} was lost: {reason}"
    elif event.what == "spare-unfit":
        yield f"the spare node {host} is unfit: {reason}"
