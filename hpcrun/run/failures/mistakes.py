"""Failures that another start would repeat, and failures that it may not.

The restart policy and ``hpcrun doctor`` read one catalog: where an entry says that a retry never helps, the
run ends.
"""

import importlib
import importlib.util
import re
import sys
from collections.abc import Iterable, Iterator, Sequence

from hpcrun.errors import UserError
from hpcrun.run.failures.catalog import KnownMessage, is_warning, match, phrases
from hpcrun.run.failures.of_nodes import (
    Passing,
    folders_of_program,
    module_may_return,
    path_may_return,
)
from hpcrun.run.failures.script_log import ScriptError

# hpcrun's refusals of a call or a value: no node and no moment changes them.
_OWN_REFUSALS = frozenset(
    {"UserError", "ConfigError", "ResultsError", "NotTrainable", "NotDeterministic", "NotSameBits"}
)
# Exit codes of a shell for a program that cannot be run or does not exist.
_NOT_RUN = (126, 127)
# Missing or closed files, missing names, and code that Python cannot read.
_OF_FILES = (FileNotFoundError, NotADirectoryError, IsADirectoryError, PermissionError)
_TO_CORRECT = (*_OF_FILES, ImportError, SyntaxError, NameError)
_NAMES_OF_FILES = frozenset(kind.__name__ for kind in _OF_FILES)
_NAMES = frozenset(
    {
        *(kind.__name__ for kind in _TO_CORRECT),
        *("ModuleNotFoundError", "IndentationError", "TabError", "UnboundLocalError"),
    }
)
# Other nodes may have the device, the driver, the library, or the memory.
_OF_A_NODE = re.compile(
    r"['\" ]/(?:dev|proc|sys)/|shared object|shared librar|undefined symbol|GLIBC|libcu|libnv"
    r"|Exec format error"
)
# Half of a file, or a library or driver that the node has in another version.
_OF_A_LIBRARY = re.compile(
    r"\.so\b|shared object|undefined symbol|GLIBC|CUDA|libcu|\bGPUs?\b|\bNVML\b|bad magic number|marshal"
)
_DRIVER = re.compile(r"CUDA error|CUDA driver|HIP error|NVIDIA driver|no CUDA-capable|No CUDA GPUs")
_BROKEN_FILE = re.compile(r"null byte|can't decode byte|Non-UTF-8|unknown encoding")
_MISSING = re.compile(r"No module named|\[Errno (?:2|13|20|21)\]")
_QUOTED = re.compile(r"'[^'\n]*'|\"[^\"\n]*\"")
_SERVER_REFUSES = re.compile(r"\b40[134] Client Error")
# A network, a file system, a server or a link between GPUs may cause these, at any place of the program.
_OF_A_SITE = (
    r"NCCL|RCCL|NVML|Xid|\bECC\b|c10d|Gloo|Dist(?:Backend|Store|Network)Error|Bus error"
    r"|Errno (?:5|11|16|26|28|70|98|99|10\d|11\d|12[12])\b|Input/output error|Stale (?:NFS )?file handle"
    r"|Text file busy|Transport endpoint|No space left|[Qq]uota exceeded"
    r"|Connection|connection|[Tt]imeout|[Tt]imed? ?out|gaierror|[Nn]ame resolution|urlopen|HTTPError|SSLError"
    r"|\b(?:429|50\d) (?:Client|Server) Error|internet|[Tt]emporar|try again|unavailable"
)
_SITE = re.compile(_OF_A_SITE)
# A node, its GPUs or its memory may cause these too.
_MAY_PASS = re.compile(
    _OF_A_SITE + r"|CUDA|\bHIP\b|cu(?:BLAS|DNN|FFT)|BLAS_STATUS|\bGPUs?\b|\bSIG[A-Z]+\b|[Kk]illed"
    r"|[Oo]ut of memory|OutOfMemory|MemoryError|Errno (?:12|32)\b|DataLoader worker \("
)
_KILLED = 128


def is_mistake(error: BaseException) -> bool:
    """Return True if ``error``, raised before the first step, would occur at every other start too.

    Errors of a node, of a file server and of a network do not count, nor an error that follows from one.
    """
    if not isinstance(error, _TO_CORRECT) or passing(error):
        return False
    text = str(error)
    if isinstance(error, _OF_FILES):
        # An error of the system without a path comes from a socket or a semaphore.
        return not text.startswith("[Errno") or error.filename is not None
    return _is_mistake_of_code(type(error).__name__, text)


def may_pass_by_cause(error: BaseException) -> bool:
    """Return True if ``error`` is raised from one that a node, a network or a server may have caused."""
    cause = error.__cause__
    if cause is None:
        return False
    if isinstance(cause, _TO_CORRECT):
        return not is_mistake(cause)
    return _of_server(type(cause).__name__, str(cause)) or bool(_DRIVER.search(str(cause)))


def passing(error: BaseException) -> Passing:
    """Return why ``error`` may not occur at another start; look at the disk and at the import path."""
    chain = list(_chain(error))
    for one in chain:
        text = f"{type(one).__name__}: {one}"
        if isinstance(one, UserError) and not one.certain and path_may_return(str(one)) == "node":
            return "node"
        if isinstance(one, _OF_FILES):
            paths = [str(name) for name in (one.filename, one.filename2) if name is not None]
            reason = path_may_return(text, paths)
            if reason:
                return reason
        if isinstance(one, ModuleNotFoundError) and one.name and _is_found(one.name):
            return "time"
    others = chain if isinstance(error, _TO_CORRECT) else chain[1:]
    return "time" if any(_of_server(type(one).__name__, str(one)) for one in others) else ""


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
    if is_refusal(error):
        return True
    if error.name:
        if error.kind not in _NAMES:
            return never_helps([error.exception])
        if error.kind in _NAMES_OF_FILES:
            return not _is_without_path(error.message)
        return _is_mistake_of_code(error.kind, error.message)
    if code in _NOT_RUN:
        return not may_pass(error.last_line)
    return error.usage or (not is_told(error.last_line) and never_helps([error.last_line]))


def passing_of_script(error: ScriptError, command: Sequence[str]) -> Passing:
    """Return why ``error`` of a script may not occur at another start; look at the disk.

    Args:
        command: the command line of the script.
    """
    if is_refusal(error):
        return ""
    text = error.exception if error.name else error.last_line
    known = error.kind in _NAMES or not error.name
    if known:
        reason = path_may_return(text)
        if reason:
            return reason
        folders = folders_of_program(command, error.traceback, error.where)
        if module_may_return(text, folders):
            return "time"
    chain = [*error.before, text] if error.kind in _NAMES else error.before
    return "time" if any(_of_server("", line) for line in chain) else ""


def is_told(line: str) -> bool:
    """Return True if the program only reports ``line``: a warning, or a failure that it handles."""
    return is_warning(line) or bool(phrases("handled").search(line))


def never_helps(lines: Iterable[str]) -> bool:
    """Return True if the catalog is certain for one of ``lines`` that no other start helps."""
    return any(entry.retry == "never" for entry in _known(lines))


def may_pass(text: str) -> bool:
    """Return True if the failure ``text`` may come from a node, a network or a server."""
    if _MAY_PASS.search(text) and not _SERVER_REFUSES.search(text):
        return True
    return any(entry.retry in ("helps", "elsewhere") for entry in _known(text.splitlines()))


def is_of_site(text: str) -> bool:
    """Return True if the failure ``text`` comes from a network, a file system or a server."""
    return bool(_SITE.search(text)) and not _SERVER_REFUSES.search(text)


def _of_server(name: str, text: str) -> bool:
    if _MISSING.search(text):
        return False
    # A name or a path may have any word.
    return is_of_site(f"{name}: {_QUOTED.sub('', text)}")


def _is_mistake_of_code(kind: str, message: str) -> bool:
    """Return True if a module, a name or the syntax is wrong on every node."""
    if kind.startswith(("Import", "Module")) and _OF_A_LIBRARY.search(message):
        return False
    return not _BROKEN_FILE.search(message)


def _is_without_path(message: str) -> bool:
    """Return True for the text of an error of the system that names no file."""
    return message.startswith("[Errno") and not re.search(r"['\"/]", message)


def _is_found(name: str) -> bool:
    """Return True if Python finds the module ``name`` now."""
    above = name.rpartition(".")[0]
    if above and above not in sys.modules:
        # The search would import it.
        return False
    importlib.invalidate_caches()
    try:
        return importlib.util.find_spec(name) is not None
    except Exception:  # A parent may fail in any way when it is imported.
        return False


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield ``error`` and the errors from which it follows."""
    seen: list[BaseException] = []
    following: BaseException | None = error
    while following is not None and following not in seen and len(seen) < 20:
        seen.append(following)
        yield following
        following = following.__cause__ or following.__context__


def _known(lines: Iterable[str]) -> list[KnownMessage]:
    found = (match(line[:4000]) for line in lines)
    return [entry for entry in found if entry is not None]
