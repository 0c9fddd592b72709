"""Runs of a Python function: its call is pickled into the run directory, and each rank writes its value.

cloudpickle, which submitit needs too, pickles functions of a script or a notebook by value, and functions
of an installed module or of the working folder by name.
"""

import hashlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

from hpcrun.api.run import Run, refusing
from hpcrun.api.submission.submitting import FunctionCall
from hpcrun.config import check_name
from hpcrun.errors import UserError, one_line
from hpcrun.run.directory import CALLS, refuse_foreign


def function_call(
    function: Callable[..., object], calls: Iterable[tuple[object, ...]], number: str = "0"
) -> FunctionCall:
    """Return the call for each tuple of arguments in ``calls``, for the interpreter of this process.

    Args:
        number: the number of the call, or a placeholder of a sweep.

    Raises:
        UserError: the function or an argument cannot be pickled.
    """
    import cloudpickle

    name = getattr(function, "__name__", type(function).__name__)
    try:
        call = (function, [*calls])
        content = pickle.dumps(sys.path) + cloudpickle.dumps(call)
        try:
            digest = _hash_of((sys.path, call))
        except (RecursionError, pickle.PicklingError):  # an object that is in its own set
            digest = hashlib.sha256(content).hexdigest()[:12]
    except Exception as error:  # of any type: pickle calls code of the arguments
        raise UserError(
            f"{name}: the function or an argument cannot be pickled: {one_line(error)}; open files and "
            "connections inside the function"
        ) from error
    file = f"{digest}.pkl"
    try:
        name = check_name(name.strip("_<>"))
    except ValueError:
        name = "function"
    command = [sys.executable, "-m", "hpcrun.call", file, number]
    return FunctionCall(name, digest, command, {f"{CALLS}/{file}": content})


def _hash_of(call: object) -> str:
    """Return the hash of a pickled call, which is equal in each process.

    The bytes are not: a set has another order in each process, and cloudpickle gives a class of the program a
    random id.
    """
    from cloudpickle import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def persistent_id(self, value: object) -> object:
            # A subclass may have more than its items.
            if isinstance(value, set | frozenset) and type(value) in (set, frozenset):
                return type(value).__name__, sorted(map(_hash_of, value))
            if type(value) is str and len(value) == 32:
                named = cloudpickle._DYNAMIC_CLASS_TRACKER_BY_CLASS.items()
                return next((one.__qualname__ for one, number in named if number == value), None)
            return None

    stream = io.BytesIO()
    Pickler(stream).dump(call)
    return hashlib.sha256(stream.getvalue()).hexdigest()[:12]


class RemoteTraceback(Exception):
    """The traceback of a rank, as the cause of the exception that :meth:`FunctionRun.result` raises."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


class _Outcome(TypedDict, total=False):
    """The file of a rank: the number of ranks, and the pickled value, or the exception with its traceback."""

    ranks: int
    content: bytes
    error: str
    time: float


class FunctionRun(Run):
    """A run of a Python function, which :func:`hpcrun.submit` with a function returns."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the end, restarts included, and return the value of the function on rank 0.

        Args:
            timeout: the longest wait in seconds; None: no limit.

        Raises:
            Exception: the function has raised it; its cause has the traceback of the rank.
            TimeoutError: the run has not ended after ``timeout`` seconds, and continues.
            UserError: the run ended without a value, for example because it was cancelled.
        """
        return self.results(timeout)[0]

    def results(self, timeout: float | None = None) -> list[Any]:
        """Return the value of every rank; waits and raises as :meth:`result`."""
        state, found = self.wait(timeout), self._outcomes()
        if state == "finished" and found:
            # Files of an attempt with more ranks may be there too.
            return [_loaded(self.name, each["content"]) for each in found[: found[0]["ranks"]]]
        errors = sorted((one for one in found if "error" in one), key=lambda one: one["time"])
        if state == "failed" and errors:
            raise _exception(errors[0]) from RemoteTraceback(errors[0]["error"])
        row = self.status()
        detail = row["diagnosis"] or row["detail"] or f"see `hpcrun logs {self.name}`"
        raise UserError(f"{self.name}: has no value, because it is {state}: {detail}")

    @refusing
    def _outcomes(self) -> list[_Outcome]:
        refuse_foreign(self._directory)  # a pickle runs code
        files = sorted((self.path / CALLS).glob("rank-*.pkl"))
        return [pickle.loads(path.read_bytes()) for path in files]


def _loaded(name: str, content: bytes) -> Any:
    try:
        return pickle.loads(content)
    except Exception as error:  # of any type: a pickle calls code of the value
        raise UserError(
            f"{name}: its value cannot be loaded here: {one_line(error)}; import its module first"
        ) from error


def _exception(outcome: _Outcome) -> Exception:
    """Return the exception of a rank, or a RuntimeError with its text if it cannot be loaded here."""
    try:
        error = pickle.loads(outcome["content"])
    except Exception:  # of any type: an empty pickle, or code of the exception
        error = None
    if isinstance(error, Exception):
        return error
    return RuntimeError(str(outcome["error"]).strip().rpartition("\n")[2])
