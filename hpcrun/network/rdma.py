"""The coordinator of the RDMA measurements: ``ib_write_bw`` between the pairs of nodes that have it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hpcrun.network.agents import Nodes
from hpcrun.network.measurements import Pair, RdmaTransfer, rounds_for
from hpcrun.network.perftest import EXTRA

_READY = 30.0


class RdmaCheck:
    """RDMA over all pairs of ``nodes``, each direction by itself.

    Args:
        addresses: of each node for the other nodes; the two ends of a measurement meet over TCP.
        seconds: of each measurement.
    """

    def __init__(self, nodes: Nodes, addresses: Mapping[str, str], seconds: int) -> None:
        self._nodes, self._addresses, self._seconds = nodes, addresses, seconds
        self.transfers: list[RdmaTransfer] = []
        self.missing: dict[str, str] = {}
        """Nodes that cannot be measured, each with the reason."""

    def run(self, progress: Callable[[int, int, str], None]) -> None:
        """Measure all pairs of nodes that can be measured."""
        facts = self._nodes.ask("rdma", _READY, lose=False)
        for name in self._nodes.live:
            obstacle = facts.get(name, {"obstacle": "no answer"})["obstacle"]
            if obstacle:
                self.missing[name] = obstacle
        rounds = rounds_for([name for name in self._nodes.live if name not in self.missing])
        for number, pairs in enumerate(rounds):
            progress(number, len(rounds), "RDMA")
            self._one_way(pairs, facts)
            self._one_way([pair[::-1] for pair in pairs], facts)

    def _one_way(self, pairs: Sequence[Pair], facts: Mapping[str, Any]) -> None:
        """Measure the pairs (sender, receiver), all at the same time."""
        receivers = {receiver for _, receiver in pairs}
        ready = self._nodes.ask("rdma-serve", _READY, receivers, lose=False, seconds=self._seconds)
        servers = {
            sender: (self._addresses[receiver], ready[receiver]["port"])
            for sender, receiver in pairs
            if "port" in ready.get(receiver, {})
        }
        limit = self._seconds + 2 * EXTRA
        order = {"servers": servers, "seconds": self._seconds}
        answers = self._nodes.ask("rdma-measure", limit, set(servers), lose=False, **order)
        for sender, receiver in pairs:
            found = answers.get(sender) or ready.get(receiver) or {}
            rate = found.get("bits_per_second")
            problem = None if rate else found.get("problem", "no answer")
            device = str(facts[sender]["device"])
            self.transfers.append(RdmaTransfer(sender, receiver, device, rate, problem))


def rdma_lines(transfers: Sequence[RdmaTransfer], missing: Mapping[str, str]) -> list[str]:
    """Return one line for each reason that a node or a pair was not measured."""
    reasons: dict[str, list[str]] = {}
    for node, reason in missing.items():
        reasons.setdefault(reason, []).append(node)
    lines = []
    for reason, nodes in reasons.items():
        where = "" if len(nodes) == len(missing) and not transfers else f" on {', '.join(nodes)}"
        lines.append(f"RDMA not measured{where}: {reason}")
    if not missing and not transfers:
        lines.append("RDMA not measured: fewer than 2 nodes")
    bad = [one for one in transfers if one.problem]
    lines += [
        f"RDMA from {one.sender} to {one.receiver}: ib_write_bw: {one.problem}" for one in bad
    ]
    return lines
