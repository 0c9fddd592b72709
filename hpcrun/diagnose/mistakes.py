"""Failures that another start would repeat, and failures that it may not.

The restart policy and ``hpcrun doctor`` read one catalog: where an entry says that a retry never helps, the
run ends.
"""

import re
from collections.abc import Iterable

from hpcrun.diagnose.catalog import KnownMessage, match
from hpcrun.diagnose.script_log import ScriptError
from hpcrun.errors import is_mistake_named

# hpcrun's refusals of a call or a value: no node and no moment changes them.
_OWN_REFUSALS = frozenset(
    {"UserError", "ConfigError", "ResultsError", "NotTrainable", "NotDeterministic", "NotSameBits"}
)
# Exit codes of a shell for a program that cannot be run or does not exist.
_NOT_RUN = (126, 127)
# Other nodes may have the device, the driver, the library, or the memory.
_OF_A_NODE = re.compile(
    r"['\" ]/(?:dev|proc|sys)/|shared object|shared librar|undefined symbol|GLIBC|libcu|libnv"
)
# A node, its GPUs, its network, its memory or a server may cause these, at any place of the program.
_MAY_PASS = re.compile(
    r"CUDA|NCCL|RCCL|\bHIP\b|cu(?:BLAS|DNN|FFT)|BLAS_STATUS|\bGPUs?\b|NVML|Xid|\bECC\b|c10d|Gloo"
    r"|DistBackendError|Bus error|\bSIG[A-Z]+\b|[Kk]illed|[Oo]ut of memory|OutOfMemory|MemoryError"
    r"|Errno (?:5|11|12|16|28|32|70|98|99|10\d|11\d|12[12])\b|Input/output error|Stale file handle"
    r"|Connection|Timeout|timed? out|gaierror|urlopen|HTTPError|[Tt]emporar|try again|unavailable"
    r"|DataLoader worker",
)
_KILLED = 128


def is_refusal(error: ScriptError) -> bool:
    """Return True if hpcrun itself refused a call of the script, which it would refuse at any time."""
    return error.name.startswith("hpcrun.") and error.kind in _OWN_REFUSALS


def repeats_at_start(error: ScriptError, code: int) -> bool:
    """Return True if ``error``, before the first step, would occur at every other start too.

    Args:
        error: the error of a script.
        code: the exit code of the script, -n for signal n.
    """
    code = error.code if error.code is not None else code
    text = f"{error.exception}\n{error.last_line}"
    if _OF_A_NODE.search(text) or code < 0 or code > _KILLED:
        return False
    if error.name.startswith("hpcrun.") and error.kind in _OWN_REFUSALS:
        return True
    if error.name:
        return is_mistake_named(error.kind, error.message) or never_helps([error.exception])
    return error.usage or code in _NOT_RUN or never_helps([error.last_line])


def never_helps(lines: Iterable[str]) -> bool:
    """Return True if the catalog is certain for one of ``lines`` that no other start helps."""
    return any(entry.retry == "never" for entry in _known(lines))


def may_pass(text: str) -> bool:
    """Return True if the failure ``text`` may come from a node, a network or a server."""
    if _MAY_PASS.search(text):
        return True
    return any(entry.retry in ("helps", "elsewhere") for entry in _known(text.splitlines()))


def _known(lines: Iterable[str]) -> list[KnownMessage]:
    found = (match(line[:4000]) for line in lines)
    return [entry for entry in found if entry is not None]
