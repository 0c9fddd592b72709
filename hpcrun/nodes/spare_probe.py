"""The probes of a spare node while it waits, so that a bad spare is known before it is needed.

The node runs `hpcrun preflight` for itself, at low priority, and tries to reach nodes of the step. No
training node starts a program for this.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROBE = "probe"
"""The name of the program on the spare node."""
EVERY = 900.0
"""Seconds between two probes of a spare node."""
_LIMIT = 300.0
# A peer may be busy for a moment, so the network is tried twice.
_NETWORK_TRIES = 2
_LEAST_URGENT = 19


def probe_command(run: Path, gpus: int) -> list[str]:
    """Return the command that checks the node on which it runs."""
    local = ["preflight", str(run), "--local", "1", "--gpus", str(gpus), "--json"]
    return [sys.executable, "-m", "hpcrun", *local]


class SpareProbe:
    """The probes of one spare node. ``running``: a program of the probe uses the node's GPUs."""

    def __init__(self) -> None:
        self.running = False
        self._due, self._began, self._unreached = 0.0, 0.0, 0
        self._fault: str | None = None

    def orders(
        self, now: float, command: Sequence[str], doors: Sequence[tuple[str, int]]
    ) -> list[tuple[str, dict[str, Any]]]:
        """Return the orders for the agent that are due at ``now`` (time.monotonic).

        Args:
            command: of :func:`probe_command`.
            doors: the addresses and ports at which nodes of the step answer.
        """
        if self.running or now < self._due:
            return []
        self.running, self._began, self._due = True, now, now + EVERY
        start = {"name": PROBE, "argv": list(command), "nice": _LEAST_URGENT}
        reach = [("reach", {"peers": list(doors)})] if doors else []
        return [("start", start), *reach]

    def hear(self, message: Mapping[str, Any]) -> None:
        """Take a message of the agent."""
        if PROBE in (message.get("ended"), message.get("stopped")):
            self.running = False
        if message.get("ended") == PROBE:
            self._fault = fault_of(str(message.get("output", "")))
        if "reached" in message:
            self._unreached = 0 if message["reached"] else self._unreached + 1
            self._due = 0.0 if 0 < self._unreached < _NETWORK_TRIES else self._due

    def fault(self, now: float) -> str | None:
        """Return the reason why the node is unfit, or None. ``now``: from time.monotonic."""
        if self.running and now - self._began > _LIMIT:
            return f"its probe has not ended within {_LIMIT:.0f} s"
        if self._unreached >= _NETWORK_TRIES:
            return "it does not reach the nodes of the step"
        return self._fault


def fault_of(report: str) -> str | None:
    """Return the first fault of the node in a report of `hpcrun preflight --json`, or None.

    A report that cannot be read says nothing about the node.
    """
    try:
        unfit = json.loads(report)["unfit"]
        return str(next(iter(unfit.values()))) if unfit else None
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
