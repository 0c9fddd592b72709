"""Checks that compare the nodes: versions, config, clocks, MTU and results must be equal."""

import statistics
from collections import Counter
from collections.abc import Mapping
from typing import Any

from hpcrun.network.preflight.preflight_facts import PreflightFacts, Result, Status

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
