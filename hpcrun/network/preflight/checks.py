"""Checks of one node's facts: a result for each check, with the remedy.

A fact that could not be read gives the result ``unknown``, which does not prevent the start of a job.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["pass", "warn", "fail", "unknown"]
Facts = Mapping[str, Any]


@dataclass(frozen=True)
class JobNeeds:
    """The part of a job that its nodes have to serve.

    ``gpus``: GPUs per node; 0: none; None: any number. ``run``: the run directory, if there is a run.
    ``apart``: the nodes are separate machines, not processes of one machine.
    """

    gpus: int | None = None
    run: str | None = None
    apart: bool = True


@dataclass
class PreflightFacts:
    """All facts of a preflight.

    ``facts``: of each node, by section. ``silent``: nodes without an answer, each with the reason. ``late``:
    nodes that answered only the second time, each with the reason of the first failure. ``offsets``: seconds
    by which a node's clock is ahead of the coordinator's, with the uncertainty.
    """

    nodes: list[str]
    asked: JobNeeds
    facts: dict[str, dict[str, Any]] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    late: dict[str, str] = field(default_factory=dict)
    offsets: dict[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0

    def add_second(self, again: "PreflightFacts") -> None:
        """Add the facts from the second check of the nodes that did not answer the first time."""
        for node in again.nodes:
            first = self.silent.pop(node)
            if node in again.silent:
                self.silent[node] = f"{again.silent[node]}; before: {first}"
            else:
                self.late[node] = first
            # Replace the answers that the node gave before it stopped answering.
            self.facts[node] = again.facts.get(node, {})
        self.offsets.update(again.offsets)
        self.seconds = round(self.seconds + again.seconds, 2)


@dataclass(frozen=True)
class Result:
    """A check's result on ``node`` (None: about all nodes), in words, and the remedy."""

    check: str
    node: str | None
    status: Status
    words: str
    remedy: str = ""

    def as_record(self) -> dict[str, Any]:
        """Return the result as one flat JSON object."""
        return asdict(self)


_GIB = 1 << 30
_MIB = 1 << 20
# Docker's default for /dev/shm is 64 MiB, in which one DataLoader worker fails with SIGBUS.
_LEAST, _LITTLE = 64 * _MIB, 1 * _GIB
_FEW_FILES = 4096
_SLOW_WRITE = 2.0
# NVML's clocks-event reasons (nvml.h, nvmlClocksEventReason*).
_HARDWARE_SLOWDOWN, _SOFTWARE_THERMAL, _HARDWARE_THERMAL, _POWER_BRAKE = 0x08, 0x20, 0x40, 0x80
# NVIDIA's "XID Errors": the GPU, its memory or its link has failed.
_BROKEN = {
    48: "double-bit ECC error",
    64: "failure to remap a damaged row of memory",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "time-out of the GPU's system processor",
    120: "error of the GPU's system processor",
}
# Usually caused by the program, or by its end.
_OF_PROGRAMS = frozenset({13, 31, 43, 45})
_RECENT = 24 * 3600.0
_REPORT = "report the node; its administrator resets or replaces the GPU"

EndedAttempt = Iterator[tuple[Status, str, str]]
Check = Callable[[Facts, JobNeeds], EndedAttempt]


def node_results(measured: PreflightFacts) -> list[Result]:
    """Return the results of all checks that concern a single node."""
    found: list[Result] = []
    for node in measured.nodes:
        if node in measured.silent:
            remedy = "exclude the node; `scontrol show node` shows what Slurm knows about it"
            found.append(Result("starts", node, "fail", measured.silent[node], remedy))
            continue
        if node in measured.late:
            words = f"answered only the second time: {measured.late[node]}"
            remedy = "check the file system with the interpreter and the packages"
            found.append(Result("starts", node, "warn", words, remedy))
        else:
            found.append(Result("starts", node, "pass", "answers"))
        facts = measured.facts.get(node, {})
        for name, check in CHECKS.items():
            found += [Result(name, node, *told) for told in check(facts, measured.asked)]
    return found


def _gpus(facts: Facts, asked: JobNeeds) -> EndedAttempt:
    if asked.gpus == 0:
        yield "pass", "none requested", ""
        return
    visible = int(facts.get("gpus", {}).get("visible", 0))
    lost = [device for device in facts.get("device", ()) if device.get("problem")]
    for device in lost:
        yield "fail", f"GPU {device['index']}: {device['problem']}", _REPORT
    if asked.gpus is not None and visible < asked.gpus:
        remedy = (
            "see nvidia-smi on the node, and the job's request for GPUs (job.gpus, job.gpu_request)"
        )
        yield "fail", f"{visible} of {asked.gpus} GPUs are visible", remedy
    elif not lost:
        yield "pass", f"{visible} visible", ""


def _ecc(facts: Facts, asked: JobNeeds) -> EndedAttempt:
    for device, name in _devices(facts):
        if device.get("remap_failed"):
            yield "fail", f"{name}: a damaged row of memory could not be replaced", _REPORT
        elif device.get("uncorrected"):
            count = device["uncorrected"]
            yield "fail", f"{name}: {count} uncorrected ECC errors since the last reset", _REPORT
        elif device.get("remap_pending"):
            remedy = "an administrator resets the GPU, which replaces the row"
            yield "warn", f"{name}: a damaged row of memory is not yet replaced", remedy
        elif device.get("uncorrected") is None:
            yield (
                "unknown",
                f"{name}: the driver reports no ECC errors (ECC is off or missing)",
                "",
            )
        else:
            yield "pass", "no uncorrected error", ""
    yield from _without_nvml(facts, asked)


def _throttling(facts: Facts, asked: JobNeeds) -> EndedAttempt:
    for device, name in _devices(facts):
        reasons = device.get("throttling")
        if reasons is None:
            yield "unknown", f"{name}: the driver reports no reasons for its clocks", ""
        elif reasons & (_HARDWARE_THERMAL | _POWER_BRAKE):
            what = "heat" if reasons & _HARDWARE_THERMAL else "its power supply"
            remedy = "report the node; its cooling or power supply has failed"
            yield "fail", f"{name}: slowed down by the hardware because of {what}", remedy
        elif reasons & (_HARDWARE_SLOWDOWN | _SOFTWARE_THERMAL):
            yield (
                "warn",
                f"{name}: slowed down (reasons {reasons:#x})",
                "see nvidia-smi -q -d PERFORMANCE",
            )
        else:
            yield "pass", "not slowed down", ""
    yield from _without_nvml(facts, asked)


def _pcie(facts: Facts, asked: JobNeeds) -> EndedAttempt:
    for device, name in _devices(facts):
        width, full = device.get("width"), device.get("full_width")
        if not width or not full:
            yield "unknown", f"{name}: the driver reports no PCIe width", ""
        elif width < full:
            # An x16 link with 4 lanes makes every copy four times slower, for all ranks.
            status: Status = "fail" if width * 4 <= full else "warn"
            remedy = "report the node; the GPU or its riser has a bad contact"
            yield status, f"{name}: {width} of {full} PCIe lanes", remedy
        else:
            yield "pass", f"x{width}", ""
    yield from _without_nvml(facts, asked)


def _xid(facts: Facts, asked: JobNeeds) -> EndedAttempt:
    buses = {_bus(device.get("bus") or ""): name for device, name in _devices(facts)}
    if not buses:
        yield from _without_nvml(facts, asked)
        return
    kernel = facts.get("kernel", {})
    if kernel.get("problem"):
        yield "unknown", kernel["problem"], ""
        return
    bad = False
    for xid in kernel.get("xids", ()):
        number, name = xid["number"], buses.get(_bus(xid["bus"]))
        if name is None or xid["age"] > _RECENT or number in _OF_PROGRAMS:
            continue
        bad = True
        ago = f"{xid['age'] / 3600:.1f} h ago"
        if number in _BROKEN:
            yield "fail", f"{name}: Xid {number} {ago}: {_BROKEN[number]}", _REPORT
        else:
            yield "warn", f"{name}: Xid {number} {ago}", "look up the number in NVIDIA's Xid list"
    if not bad:
        yield "pass", "none in 24 hours", ""


def _gemm(facts: Facts, asked: JobNeeds) -> EndedAttempt:
    products = facts.get("product", [])
    for product in products:
        device = product["device"]
        if product.get("problem"):
            yield (
                "fail",
                f"{device}: {product['problem']}",
                "see nvidia-smi on the node, and report it",
            )
        elif product["wrong"]:
            words = f"{device}: {product['wrong']} entries of a matrix product are wrong"
            yield "fail", words, "report the node; its results cannot be trusted"
        elif device == "cpu" and asked.gpus:
            yield "unknown", "torch sees no GPU; exact on the CPU", ""
        else:
            yield "pass", f"exact on {device}", ""
    child = facts.get("gemm")
    if child is None:
        return
    # Without torch the program printed no line; that failure concerns all nodes.
    if "libraries" in facts:
        status: Status = "unknown" if asked.gpus == 0 else "fail"
        yield status, child["problem"], "try `python -m hpcrun.network.preflight.gemm` on the node"


def _space(facts: Facts, _asked: JobNeeds) -> EndedAttempt:
    for space in facts.get("space", ()):
        what, path = space["what"], space["path"]
        name = what if what == path else f"{what} {path}"
        remedy = "delete files of other jobs there, or exclude the node"
        if what == "/dev/shm":
            remedy = "mount a larger one (containers: --shm-size), or use data.workers=0"
        if "problem" in space:
            yield "warn", f"{name}: {space['problem']}", remedy
        elif space["free"] < _LEAST or space["free_files"] == 0:
            words = (
                "no free inodes"
                if space["free_files"] == 0
                else f"{space['free'] / _MIB:.0f} MiB free"
            )
            yield "fail", f"{name}: {words}", remedy
        elif space["free"] < _LITTLE:
            yield "warn", f"{name}: {space['free'] / _MIB:.0f} MiB free", remedy
        else:
            yield "pass", f"{name}: {space['free'] / _GIB:.0f} GiB free", ""


def _files(facts: Facts, _asked: JobNeeds) -> EndedAttempt:
    written, unseen = facts.get("write"), facts.get("unseen", {"count": 0, "names": []})
    if written is None:
        return
    if "problem" in written:
        remedy = "check the mount, the owner and the quota of the folder on this node"
        yield "fail", f"cannot write: {written['problem']}", remedy
    elif unseen["count"]:
        words = f"does not see the files of {', '.join(unseen['names'])}"
        yield "fail", words, "put the run on a file system that all nodes share"
    elif written["seconds"] > _SLOW_WRITE:
        yield (
            "warn",
            f"a small write with fsync took {written['seconds']:.1f} s",
            "expect slow saves",
        )
    else:
        yield "pass", f"write with fsync in {written['seconds'] * 1000:.0f} ms, seen by all", ""


def _limits(facts: Facts, _asked: JobNeeds) -> EndedAttempt:
    limits = facts.get("limits")
    if limits is None:
        return
    few = {
        "open files (ulimit -n)": limits["files"],
        "processes (ulimit -u)": limits["processes"],
    }
    bad = False
    for what, value in few.items():
        if value is not None and value < _FEW_FILES:
            bad = True
            yield "warn", f"{value} {what}", f"raise the limit to {_FEW_FILES} or more in job.setup"
    if limits["rdma"] and limits["locked"] is not None:
        bad = True
        words = f"{limits['locked'] // 1024} KiB of locked memory (ulimit -l), with RDMA devices"
        yield "warn", words, "the administrator sets LimitMEMLOCK=infinity for slurmd"
    if not bad:
        yield "pass", "enough", ""


def _names(facts: Facts, asked: JobNeeds) -> EndedAttempt:
    names = facts.get("names")
    if names is None:
        return
    if names["unresolved"]:
        remedy = "add the names to DNS or /etc/hosts, or set job.interface"
        yield "warn", f"cannot resolve {', '.join(names['unresolved'])}", remedy
    elif names["loopback"] and asked.apart:
        words = f"{names['own']} resolves only to loopback"
        yield "warn", words, "a program that binds to the host name needs GLOO_SOCKET_IFNAME"
    else:
        yield "pass", "resolve", ""


CHECKS: Mapping[str, Check] = {
    "gpus": _gpus,
    "ecc": _ecc,
    "xid": _xid,
    "throttling": _throttling,
    "pcie": _pcie,
    "gemm": _gemm,
    "space": _space,
    "run directory": _files,
    "limits": _limits,
    "host names": _names,
}


def _devices(facts: Facts) -> list[tuple[Mapping[str, Any], str]]:
    return [
        (device, f"GPU {device['index']}")
        for device in facts.get("device", ())
        if not device.get("problem")
    ]


def _without_nvml(facts: Facts, asked: JobNeeds) -> EndedAttempt:
    """Return one result that explains the missing numbers, if GPUs are expected or visible."""
    gpus = facts.get("gpus", {})
    wanted = bool(asked.gpus or gpus.get("visible"))
    if wanted and not facts.get("device") and gpus.get("problem"):
        yield "unknown", gpus["problem"], "pip install 'hpcrun[gpu]'"


def _bus(text: str) -> str:
    """Return a PCI address without domain and function, which the driver and NVML write differently."""
    parts = text.lower().split(".")[0].split(":")
    return ":".join(parts[-2:])
