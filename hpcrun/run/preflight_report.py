"""The preflight report in the attempt's logs: written before the ranks start, read after their end."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcrun.run.io.files import read_json, write_json

_NAME = "preflight.json"


@dataclass(frozen=True)
class PreflightFailure:
    """Failure of a preflight: its first ``cause`` as a line, and the ``nodes`` to exclude."""

    cause: str
    nodes: tuple[str, ...]


def record_report(folder: Path, report: Mapping[str, Any]) -> None:
    """Write a preflight's report into an attempt's logs; raises OSError when the disk refuses."""
    write_json(folder / _NAME, report)


def read_unfit(folder: Path) -> PreflightFailure | None:
    """Return the failure of an attempt's preflight; None if it passed, or there was no preflight.

    Raises:
        OSError: the report exists but cannot be read.
    """
    report = read_json(folder / _NAME)
    if report is None or not report.get("cause"):
        return None
    return PreflightFailure(str(report["cause"]), tuple(map(str, report.get("unfit") or ())))
