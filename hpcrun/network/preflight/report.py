"""The report of a preflight: the nodes to exclude, lines for people, and JSON for programs."""

import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from hpcrun.network.preflight.checks import PreflightFacts, Result, Status, node_results

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


# The result of the check of each version, if nodes differ.
_VERSIONS: Mapping[str, Status] = {
    "python": "fail",
    "hpcrun": "fail",
    "torch": "fail",
    "cuda": "fail",
    "nccl": "fail",
    "driver": "warn",
}
# Seconds. The first failure of a run is found by the times that its ranks write.
_APART, _FAR_APART = 0.5, 60.0
# A GPU should be within 10 % of the best; the first products of a job vary by more.
_SLOWER = 1.25


def shared_results(measured: PreflightFacts) -> list[Result]:
    """Return the results that compare nodes or devices."""
    found = [*_torch(measured), *_versions(measured), *_config(measured), *_clocks(measured)]
    return [*found, *_mtu(measured), *_same_product(measured), *_speeds(measured)]


def _torch(measured: PreflightFacts) -> list[Result]:
    """Name the nodes that cannot import torch. If no node can, the job may not need torch."""
    failed = {
        node: facts["gemm"]["problem"]
        for node, facts in _told(measured).items()
        if "libraries" not in facts and "gemm" in facts
    }
    everywhere = len(failed) == len(_told(measured))
    status: Status = "warn" if everywhere else "fail"
    others = "; no node can import torch" if everywhere else "; other nodes can"
    remedy = "try `python -c 'import torch'` on the node, with the Python of the job (job.python)"
    return [
        Result("torch", node, status, f"cannot be imported: {problem}{others}", remedy)
        for node, problem in failed.items()
    ]


def _versions(measured: PreflightFacts) -> list[Result]:
    found: list[Result] = []
    for what, status in _VERSIONS.items():
        values = {}
        for node, facts in _told(measured).items():
            sections = ("versions", "libraries", "gpus")
            told = next((facts[it][what] for it in sections if facts.get(it, {}).get(what)), None)
            if told is not None:
                values[node] = str(told)
        remedy = "use one environment on all nodes (job.python, job.container), or exclude the node"
        found += _differing("versions", what, values, status, remedy)
    told = ", ".join(_common(measured))
    return found or [Result("versions", None, "pass", f"equal: {told}")] if told else found


def _common(measured: PreflightFacts) -> list[str]:
    nodes = list(_told(measured).values())
    sections = ("versions", "libraries", "gpus")
    told = {
        what: nodes[0][it][what]
        for it in sections
        for what in _VERSIONS
        if nodes and all(facts.get(it, {}).get(what) for facts in nodes)
    }
    return [f"{what} {value}" for what, value in told.items()]


def _config(measured: PreflightFacts) -> list[Result]:
    values: dict[str, str] = {}
    found: list[Result] = []
    for node, facts in _told(measured).items():
        config = facts.get("config")
        if config is None:
            continue
        if "problem" in config:
            remedy = "check the mount of the run directory on this node"
            found.append(
                Result("config", node, "fail", f"cannot be read: {config['problem']}", remedy)
            )
        else:
            values[node] = config["hash"][:12]
    remedy = "put the run on a file system that all nodes share"
    found += _differing("config", "hash", values, "fail", remedy)
    if values and not found:
        found.append(Result("config", None, "pass", f"hash {next(iter(values.values()))}"))
    return found


def _clocks(measured: PreflightFacts) -> list[Result]:
    if not measured.asked.apart or len(measured.offsets) < 2:
        return []
    usual = statistics.median(offset for offset, _ in measured.offsets.values())
    found: list[Result] = []
    widest = 0.0
    for node, (offset, uncertain) in measured.offsets.items():
        apart = abs(offset - usual)
        widest = max(widest, apart)
        sure = apart - uncertain
        if sure > _APART:
            status: Status = "fail" if sure > _FAR_APART else "warn"
            side = "ahead" if offset > usual else "behind"
            words = f"the clock is {apart:.1f} s {side}"
            found.append(
                Result("clock", node, status, words, "the administrator starts chronyd or ntpd")
            )
    return found or [Result("clock", None, "pass", f"within {widest * 1000:.0f} ms")]


def _mtu(measured: PreflightFacts) -> list[Result]:
    values = {
        node: str(facts["mtu"]["mtu"])
        for node, facts in _told(measured).items()
        if facts.get("mtu", {}).get("mtu")
    }
    if len(values) < 2:
        return []
    remedy = "large packets are lost between the nodes: the administrator sets one MTU on all nodes"
    found = _differing("mtu", "MTU", values, "warn", remedy)
    return found or [Result("mtu", None, "pass", next(iter(values.values())))]


def _same_product(measured: PreflightFacts) -> list[Result]:
    """Name the devices with a product that differs from that of most devices, bit for bit."""
    values = {
        (node, product["device"]): str(product["digest"]) for node, product in _products(measured)
    }
    usual, odd = _odd(values)
    remedy = "report the node; its results cannot be trusted"
    return [
        Result(
            "gemm",
            node if usual else None,
            "fail",
            f"{device}: another product than others",
            remedy,
        )
        for node, device in odd
    ]


def _speeds(measured: PreflightFacts) -> list[Result]:
    """Name GPUs that are slower than the best of the same model. Shared CPUs are not compared."""
    times: dict[str, list[tuple[str, Any]]] = {}
    for node, product in _products(measured):
        if product["device"] != "cpu":
            times.setdefault(product["name"], []).append((node, product))
    found: list[Result] = []
    for model, products in times.items():
        best = min(product["seconds"] for _, product in products)
        for node, product in products:
            if product["seconds"] > _SLOWER * best:
                share = product["seconds"] / best
                words = f"{product['device']} takes {share:.2f} times as long as the best {model}"
                found.append(
                    Result("gemm", node, "warn", words, "check its clocks: nvidia-smi -q -d CLOCK")
                )
    return found


def _products(measured: PreflightFacts) -> list[tuple[str, Any]]:
    return [
        (node, product)
        for node, facts in _told(measured).items()
        for product in facts.get("product", ())
        if not product.get("problem")
    ]


def _differing(
    check: str, what: str, values: Mapping[str, str], status: Status, remedy: str
) -> list[Result]:
    """Return a result for each node that differs from most, or a single result without a majority."""
    usual, odd = _odd(values)
    if not odd:
        return []
    if usual is None:
        told = ", ".join(f"{node} has {value}" for node, value in sorted(values.items())[:4])
        return [Result(check, None, status, f"{what} differs: {told}", remedy)]
    return [
        Result(check, node, status, f"{what} is {values[node]}, on most nodes {usual}", remedy)
        for node in odd
    ]


def _odd(values: "Mapping[Any, str]") -> tuple[str | None, list[Any]]:
    """Return the value of more than half of the keys (None: there is none), and the keys that differ."""
    if len(set(values.values())) < 2:
        return next(iter(values.values()), None), []
    usual, count = Counter(values.values()).most_common(1)[0]
    if count * 2 <= len(values):
        return None, list(values)
    return usual, [key for key, value in values.items() if value != usual]


def _told(measured: PreflightFacts) -> Mapping[str, Mapping[str, Any]]:
    """Return the facts of the nodes that gave all answers."""
    return {
        node: measured.facts[node]
        for node in measured.nodes
        if node in measured.facts and node not in measured.silent
    }
