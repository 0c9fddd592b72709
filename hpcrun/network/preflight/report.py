"""The report of a preflight: the nodes to exclude, lines for people, and JSON for programs."""

from collections.abc import Sequence
from typing import Any

from hpcrun.network.preflight.agreement import shared_results
from hpcrun.network.preflight.checks import node_results
from hpcrun.network.preflight.preflight_facts import PreflightFacts, Result, Status

# Checks of the node itself. A failure of any other check may come from the job or its files, so it counts
# against a node only if another node passes.
_OF_THE_NODE = frozenset({"starts", "gpus", "ecc", "xid", "throttling", "pcie", "gemm", "torch"})
_ORDER: Sequence[Status] = ("fail", "warn", "unknown", "pass")


def results(measured: PreflightFacts) -> list[Result]:
    """Return the results of all checks, in the order of the checks."""
    found = [*node_results(measured), *shared_results(measured)]
    first = {one.check: number for number, one in reversed(list(enumerate(found)))}
    return sorted(found, key=lambda one: first[one.check])


def failures(found: Sequence[Result]) -> list[Result]:
    """Return the results that keep the job from starting."""
    return [one for one in found if one.status == "fail"]


def unfit(measured: PreflightFacts, found: Sequence[Result]) -> dict[str, str]:
    """Return the nodes to exclude, each with its first failure.

    A check that fails on all of several nodes excludes none: the job requests something that no node has.
    """
    nodes = len(measured.nodes)
    bad: dict[str, str] = {}
    for one in failures(found):
        if one.node is None:
            continue
        failing = {other.node for other in failures(found) if other.check == one.check}
        alone = nodes == 1 and one.check in _OF_THE_NODE
        if alone or len(failing - {None}) < nodes:
            bad.setdefault(one.node, f"{one.check}: {one.words}")
    return bad


def cause(found: Sequence[Result], bad: dict[str, str]) -> str:
    """Return the failure in one line, with its node and remedy."""
    failed = failures(found)
    first = next((one for one in failed if one.node in bad), failed[0])
    where = f" on {first.node}" if first.node else ""
    more = f" (and {len(failed) - 1} more failures)" if len(failed) > 1 else ""
    return f"preflight{where}: {first.check}: {first.words}{more}; {first.remedy}"


def lines(measured: PreflightFacts, found: Sequence[Result]) -> list[str]:
    """Return the report: a line for each check that passes everywhere, and for each other result."""
    checks = list(dict.fromkeys(one.check for one in found))
    width = max(map(len, checks), default=0)
    text: list[str] = []
    for check in checks:
        of_check = [one for one in found if one.check == check]
        bad = [one for one in of_check if one.status != "pass"]
        for one in sorted(bad, key=lambda one: _ORDER.index(one.status)):
            where = f"{one.node}: " if one.node else ""
            remedy = f"; {one.remedy}" if one.remedy else ""
            text.append(f"{one.status:<7}  {check:<{width}}  {where}{one.words}{remedy}")
        if not bad:
            text += [f"{'pass':<7}  {check:<{width}}  {words}" for words in _said(of_check)]
    return [*text, "", *_conclusion(measured, found)]


def _said(passed: Sequence[Result]) -> list[str]:
    """Return the result of the first node as an example: the numbers of other nodes differ slightly."""
    first = [one.words for one in passed if one.node == passed[0].node]
    return list(dict.fromkeys(first))


def _conclusion(measured: PreflightFacts, found: Sequence[Result]) -> list[str]:
    count = len(measured.nodes)
    nodes = f"{count} node" + ("s" if count > 1 else "")
    bad = unfit(measured, found)
    if bad:
        return [f"not fit: {', '.join(bad)}", f"--exclude={','.join(bad)}"]
    if failures(found):
        return [
            f"{nodes} checked in {measured.seconds:.1f} s: not fit, and no single node is the cause"
        ]
    return [f"{nodes} checked in {measured.seconds:.1f} s: fit"]


def as_data(measured: PreflightFacts, found: Sequence[Result]) -> dict[str, Any]:
    """Return everything as plain data: sizes in bytes, times in seconds."""
    bad = unfit(measured, found)
    return {
        "fit": not failures(found),
        "unfit": bad,
        "cause": cause(found, bad) if failures(found) else None,
        "results": [one.as_record() for one in found],
        "nodes": measured.nodes,
        "silent": measured.silent,
        "facts": measured.facts,
        "clock_offsets": {node: list(pair) for node, pair in measured.offsets.items()},
        "seconds": measured.seconds,
    }
