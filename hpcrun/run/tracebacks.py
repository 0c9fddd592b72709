"""The place of an exception in the user's code.

The deepest frame of a traceback is often torch's or Python's, and the first frames are of this package. The
code may have run from the copy in the run directory: the user edits the original.
"""

import re
import sysconfig
import traceback
from itertools import groupby
from pathlib import Path

from hpcrun.run.directory import RunDirectory
from hpcrun.run.io.files import read_json

_PACKAGE = Path(__file__).parents[1]
_LIBRARY = tuple({sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")})
_SITE = {"site-packages", "dist-packages"}
_FOLDED = "<hpcrun>"
_FOLDED_FRAME = re.compile(rf'File "{_FOLDED}", line (\d+), in .*\n')
# torch wraps an exception of a loader process: the message contains the traceback.
_IN_LOADER = re.compile(r"Caught \w+ in (?P<where>.+)\.\nOriginal Traceback")
_FRAME = re.compile(r'^ *File "(?P<file>.+)", line (?P<line>\d+), in ', re.MULTILINE)


def place_of(error: BaseException) -> tuple[str, str]:
    """Return the deepest place of ``error`` in code of neither a library nor this package.

    Returns:
        ``file:line`` with the original path, and with the path of the copy in the run directory, if the copy
        ran. Both are empty for an exception without a traceback.
    """
    places = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    if not places:
        return "", ""
    if _IN_LOADER.match(str(error)):
        places += [(found["file"], int(found["line"])) for found in _FRAME.finditer(str(error))]
    if isinstance(error, SyntaxError) and error.filename:
        places.append((error.filename, error.lineno))
    known = [(*original(file), line) for file, line in places]
    mine = [place for place in known if is_own_code(place[0])]
    file, copy, line = (mine or known)[-1]
    return f"{file}:{line}", f"{copy}:{line}" if copy else ""


def headline(message: str) -> str:
    """Return the most useful line of a message: the first, or from a loader process the last."""
    lines = message.strip().splitlines()
    if not lines:
        return "no message"
    found = _IN_LOADER.match(message)
    return f"{lines[-1]} (in {found['where']})" if found else lines[0]


def traceback_of(error: BaseException) -> str:
    """Return the traceback of ``error`` with original paths; frames of this package are only counted.

    If this package has raised the exception, its last frame stays.
    """
    trace = traceback.TracebackException.from_exception(error)
    _fold(trace, set())
    return "".join(_FOLDED_FRAME.sub(_counted, chunk) for chunk in trace.format())


def original(file: str) -> tuple[str, str]:
    """Return the original of ``file``, and ``file``; for a file that is no copy: ``file`` and ""."""
    path = Path(file)
    for root in path.parents:
        if root.parent.name != "code":
            continue
        run = RunDirectory(root.parent.parent)
        code = (read_json(run.record) or {}).get("code") if run.exists() else None
        if isinstance(code, dict):
            return str(Path(str(code.get("source"))) / path.relative_to(root)), file
    return file, ""


def _fold(trace: traceback.TracebackException, seen: set[int]) -> None:
    if id(trace) in seen:
        return
    seen.add(id(trace))
    frames = list(trace.stack)
    for frame in frames:
        _ = frame.line  # Read before the path changes, from the file that ran.
        frame.filename, _copy = original(frame.filename)
    ours_of = [is_package_code(frame.filename) for frame in frames]
    mine = [
        not (ours or _is_library(it.filename)) for ours, it in zip(ours_of, frames, strict=True)
    ]
    if True in mine and True in ours_of[: mine.index(True)]:
        # Fold Python's frames between those of hpcrun too, such as contextlib's: they explain nothing.
        ours_of[ours_of.index(True) : mine.index(True)] = [True] * (
            mine.index(True) - ours_of.index(True)
        )
    kept: list[traceback.FrameSummary] = []
    for ours, pairs in groupby(zip(ours_of, frames, strict=True), key=lambda pair: pair[0]):
        run = [frame for _, frame in pairs]
        last = run[-1:] if ours and run[-1] is frames[-1] else []
        folded = run[: len(run) - len(last)]
        if ours and folded:
            kept.append(
                traceback.FrameSummary(_FOLDED, len(folded), "", lookup_line=False, line="")
            )
        kept += last if ours else run
    trace.stack[:] = kept
    causes = [trace.__cause__, trace.__context__, *(getattr(trace, "exceptions", None) or ())]
    for cause in causes:
        if cause is not None:
            _fold(cause, seen)


def _counted(found: "re.Match[str]") -> str:
    count = int(found[1])
    return f"… {count} {'frame' if count == 1 else 'frames'} of hpcrun\n"


def is_own_code(file: str) -> bool:
    """Return True if ``file`` is user code: neither a library nor this package."""
    return not (is_package_code(file) or _is_library(file))


def is_package_code(file: str) -> bool:
    """Return True if ``file`` belongs to this package and is not a built-in task."""
    # Users read and change built-in tasks like user code.
    path = Path(file)
    return path.is_relative_to(_PACKAGE) and not path.is_relative_to(_PACKAGE / "tasks")


def _is_library(file: str) -> bool:
    return file.startswith(("<", *_LIBRARY)) or not _SITE.isdisjoint(Path(file).parts) or file == ""
