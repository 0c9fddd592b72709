"""A preflight: runs every probe on every node, and says which nodes are unfit."""

import contextlib
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from hpcrun.network.agents import Begin, Nodes, on_slurm, start
from hpcrun.network.agents import here as agents_here
from hpcrun.network.probes import (
    RUN_DIRECTORY,
    SLOW_WRITE,
    Finding,
    Probe,
    findings_of,
    probes,
    record_from,
)
from hpcrun.network.probes import lines as finding_lines
from hpcrun.ports.node_checks import Answer, Needs, Record
from hpcrun.slurm.containers import Container

# Seconds. A slow file system delays the start of an agent on a good node.
_START, _WRITE, _READ = 120.0, 60.0, 120.0


@dataclass
class PreflightFacts:
    """The findings of the probes.

    ``found``: for each node. ``silent``: nodes without an answer, each with the reason. ``added``: the checks
    of other packages.
    """

    nodes: list[str]
    found: dict[str, list[tuple[str, Record]]] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    added: Sequence[Probe] = ()

    def tell(self, node: str, check: str, record: Record) -> None:
        """Add a record of a node."""
        self.found.setdefault(node, []).append((check, record))


def check_nodes(
    needs: Needs,
    *,
    folder: Path | None,
    python: str | None = None,
    container: Container | None = None,
    added: Sequence[Probe] = (),
) -> PreflightFacts:
    """Check the hosts of ``needs``, nodes of this allocation, in the environment of the ranks.

    Args:
        folder: a shared folder, in which the nodes write and read files; None: no such check.
        python: ``job.python``.
        container: of the ranks.
        added: the checks of other packages.
    """
    return measure(on_slurm(python, container, os.environ), needs.hosts, needs, folder, added)


def check_here(
    count: int, needs: Needs, *, folder: Path | None, added: Sequence[Probe] = ()
) -> PreflightFacts:
    """Check this machine with ``count`` processes instead of nodes."""
    names = [f"local{index}" for index in range(count)]
    return measure(agents_here, names, needs, folder, added)


def measure(
    begin: Begin,
    names: Sequence[str],
    needs: Needs,
    folder: Path | None,
    added: Sequence[Probe] = (),
) -> PreflightFacts:
    """Run all probes, then ``added``, on the nodes that ``begin`` starts agents on."""
    began = time.monotonic()
    measured = PreflightFacts(list(names), added=added)
    nodes = start(begin, names, _START)
    try:
        wanted = asdict(needs)
        for one in [*probes().values(), *added]:
            order = {"needs": wanted} if one not in added else {"needs": wanted, "check": one.name}
            reported = nodes.ask("added" if one in added else one.name, one.seconds, **order)
            for node, records in reported.items():
                for record in records:
                    measured.tell(node, one.name, record_from(record))
        if folder is not None:
            _share(nodes, measured, folder)
    finally:
        nodes.close()
    for name in names:
        if name not in nodes.live:
            measured.silent[name] = nodes.silent.get(name, "its task was ended")
    if len(measured.silent) == len(names):
        words = " ".join(nodes.words().split())[:300]
        measured.silent = dict.fromkeys(names, words or next(iter(measured.silent.values())))
    measured.seconds = round(time.monotonic() - began, 2)
    return measured


def _share(nodes: Nodes, measured: PreflightFacts, folder: Path) -> None:
    """Have every node write a file, and then read the files of all."""
    mount = "check the mount, the owner and the quota of the folder on this node"
    try:
        place = Path(tempfile.mkdtemp(prefix=".preflight-", dir=folder))
    except OSError as error:
        for name in nodes.live:
            words = f"cannot write: {folder}: {error.strerror}"
            measured.tell(name, RUN_DIRECTORY, Answer("fail", words, mount))
        return
    try:
        written = nodes.ask("write", _WRITE, folder=str(place))
        names = [name for name, reported in written.items() if "seconds" in reported]
        unseen = nodes.ask("read", _READ, folder=str(place), names=names)
    finally:
        with contextlib.suppress(OSError):
            for path in place.iterdir():
                path.unlink()
            place.rmdir()
    for name, left in unseen.items():
        reported = written[name]
        if "problem" in reported:
            answer = Answer("fail", f"cannot write: {reported['problem']}", mount)
        elif left:
            remedy = "put the run on a file system that all nodes share"
            answer = Answer("fail", f"does not see the files of {', '.join(left)}", remedy)
        elif reported["seconds"] > SLOW_WRITE:
            words = f"a small write with fsync took {reported['seconds']:.1f} s"
            answer = Answer("warn", words, "expect slow saves")
        else:
            words = f"write with fsync in {reported['seconds'] * 1000:.0f} ms, seen by all"
            answer = Answer("pass", words)
        measured.tell(name, RUN_DIRECTORY, answer)


def results(measured: PreflightFacts) -> list[Finding]:
    """Return the findings of all checks, also of those that pass."""
    return [*_starts(measured), *findings_of(_answered(measured))]


def _answered(measured: PreflightFacts) -> dict[str, list[tuple[str, Record]]]:
    return {
        node: measured.found.get(node, []) for node in measured.nodes if node not in measured.silent
    }


def _starts(measured: PreflightFacts) -> list[Finding]:
    found = []
    for node in measured.nodes:
        if node in measured.silent:
            remedy = "exclude the node; `scontrol show node` shows what Slurm knows about it"
            found.append(Finding("starts", (node,), "fail", measured.silent[node], remedy))
        else:
            found.append(Finding("starts", (node,), "pass", "answers"))
    return found


def failures(found: Sequence[Finding]) -> list[Finding]:
    """Return the findings that keep the job from starting."""
    return [one for one in found if one.status == "fail"]


def unfit(measured: PreflightFacts, found: Sequence[Finding]) -> dict[str, str]:
    """Return the nodes to exclude, each with its first failure.

    A check that fails on all of several nodes excludes none: the job requests something that no node has.
    The only node of a job is excluded for its hardware alone: another failure may come from the job.
    """
    of_hardware = (one for one in (*probes().values(), *measured.added) if one.hardware)
    hardware = {"starts", *(one.name for one in of_hardware)}
    bad: dict[str, str] = {}
    for one in failures(found):
        if not one.nodes:
            continue
        failing = {other.nodes for other in failures(found) if other.check == one.check} - {()}
        own = one.check in hardware
        if len(failing) < len(measured.nodes) or (own and len(measured.nodes) == 1):
            bad.setdefault(one.nodes[0], f"{one.check}: {one.words}")
    return bad


def cause(found: Sequence[Finding], bad: Mapping[str, str]) -> str:
    """Return the failure in one line, with its node and remedy."""
    failed = failures(found)
    first = next((one for one in failed if one.nodes and one.nodes[0] in bad), failed[0])
    where = f" on {first.nodes[0]}" if first.nodes else ""
    more = f" (and {len(failed) - 1} more failures)" if len(failed) > 1 else ""
    return f"preflight{where}: {first.check}: {first.words}{more}; {first.remedy}"


def lines(measured: PreflightFacts, found: Sequence[Finding]) -> list[str]:
    """Return the report, which ends with the option that excludes the unfit nodes."""
    count, bad = len(measured.nodes), unfit(measured, found)
    nodes = f"{count} node{'s' if count > 1 else ''} checked in {measured.seconds:.1f} s"
    end = [f"{nodes}: fit"]
    if bad:
        end = [f"not fit: {', '.join(bad)}", f"--exclude={','.join(bad)}"]
    elif failures(found):
        end = [f"{nodes}: not fit, and no single node is the cause"]
    return [*finding_lines(found), "", *end]


def as_data(measured: PreflightFacts, found: Sequence[Finding]) -> dict[str, Any]:
    """Return everything as plain data: times in seconds."""
    bad = unfit(measured, found)
    return {
        "fit": not failures(found),
        "unfit": bad,
        "cause": cause(found, bad) if failures(found) else None,
        "results": [one.as_record() for one in found],
        "nodes": measured.nodes,
        "silent": measured.silent,
        "found": {
            node: [asdict(record) | {"check": check} for check, record in reported]
            for node, reported in measured.found.items()
        },
        "seconds": measured.seconds,
    }
