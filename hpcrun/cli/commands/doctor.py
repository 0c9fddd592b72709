"""Find out why a job failed: the first error, its place, and the remedy.

Reads a run with all records of its newest attempt, or the logs of any job:
files, a folder of files, or `-` for the standard input. Exit code: 0 no
known failure, 1 a cause or an unknown error was found, 2 bad input.
"""

import argparse
import sys
from collections.abc import Iterator
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from hpcrun.cli.arguments import add_runs_dir, find_run_instead, runs_dir
from hpcrun.cli.output import print_json
from hpcrun.diagnose.finding import UNKNOWN, FailureFinding, find_cause
from hpcrun.diagnose.read_log import LogLine, read_log, read_stream
from hpcrun.diagnose.run_lines import (
    LOGS,
    accounting_of,
    attempt_to_diagnose,
    lines_of_attempt,
)
from hpcrun.diagnose.stacks import ranges
from hpcrun.errors import UserError
from hpcrun.printing import say
from hpcrun.run.directory import RunDirectory
from hpcrun.run.failures.catalog import RETRY_WORDS
from hpcrun.run.files import read_json
from hpcrun.run.journal.journal import Journal
from hpcrun.run.slow_nodes import replaced_now, slow_now
from hpcrun.slurm.launch import jobs


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument(
        "sources",
        nargs="+",
        metavar="RUN|LOGFILE|-",
        help="a run, or the logs of one job: files, a folder, or - (standard input)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_runs_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    """Diagnose and print; return 1 if a cause or an unknown error was found."""
    lines, nodes, notes = _lines(arguments)
    finding = find_cause(lines, nodes)
    if arguments.json:
        print_json(_as_data(finding, notes))
    else:
        say(*_report(finding), *(f"note      {note}" for note in notes))
    return int(finding is not None)


_Sources = tuple[Iterator[LogLine], int, list[str]]
"""Lines of logs, the number of nodes (0: unknown), notes about the run."""


def _lines(arguments: argparse.Namespace) -> _Sources:
    """Return what to read."""
    sources: list[str] = arguments.sources
    if sources == ["-"]:
        return read_stream(sys.stdin.buffer, "-"), 0, []
    if "-" in sources:
        raise UserError("doctor: `-` excludes other sources; pipe all logs into it, or name files")
    paths = [Path(source) for source in sources]
    if len(sources) == 1 and not _is_log(paths[0]):
        missing = "contains no logs" if paths[0].is_dir() else "no such log"
        return _of_run(find_run_instead(sources[0], runs_dir(arguments), missing))
    files: list[Path] = []
    for path in paths:
        if not _is_log(path):
            raise UserError(f"{path}: no such log; name files, a folder with logs, or one run")
        files += _logs_in(path) if path.is_dir() else [path]
    return chain.from_iterable(map(read_log, files)), 0, []


def _is_log(path: Path) -> bool:
    if path.is_dir():
        return not RunDirectory(path.absolute()).exists() and bool(_logs_in(path))
    return path.exists()


def _logs_in(folder: Path) -> list[Path]:
    return sorted(path for pattern in LOGS for path in folder.glob(pattern) if path.is_file())


def _of_run(directory: RunDirectory) -> _Sources:
    result = read_json(directory.result) or {}
    state = Journal(directory).read()
    attempt = attempt_to_diagnose(state)
    if attempt is None:
        raise UserError(
            f"{directory.name}: no attempt has begun ({jobs.state(directory).word}); look again later"
        )
    notes = [*(one.line for one in slow_now(state)), *replaced_now(state)]
    if attempt.label != "0":
        start = "a restart inside the allocation" if attempt.in_place else "a requeue"
        notes.append(f"attempt {attempt.owner} began by {start}")
    if result.get("state") == "finished":
        return iter(()), 0, notes
    current = jobs.current_job(directory)
    on_slurm = current is not None and current[0] == "slurm"
    accounting = accounting_of(attempt.job)[attempt.restart :][:1] if on_slurm else []
    lines = lines_of_attempt(directory, attempt, state, accounting=accounting)
    return lines, state.nodes_of(attempt), notes


_LINE = 300
_NOT_SHOWN = ("until", "frames")


def _report(finding: FailureFinding | None) -> list[str]:
    """Return the diagnosis as a few lines of text."""
    if finding is None:
        return ["hpcrun: no known failure"]
    evidence = []
    for line in finding.evidence:
        text = " ".join(line.text.split())
        text = text if len(text) <= _LINE else f"{text[:_LINE]} …"
        evidence.append(f"evidence  {line.place}: {text}")
    if finding.id == UNKNOWN:
        return ["hpcrun: no known failure; the last error is", *evidence]
    where = [
        *([f"rank {finding.rank}"] if finding.rank is not None else []),
        *([f"node {finding.node}"] if finding.node else []),
        *(
            [f"the same message on {ranges(finding.ranks, 'rank')}"]
            if len(finding.ranks) > 1
            else []
        ),
    ]
    lines = [
        f"cause     {finding.cause} ({finding.id}, confidence {finding.confidence})",
        *([f"where     {', '.join(where)}"] if where else []),
        *evidence,
        f"remedy    {finding.remedy}",
        f"retry     {RETRY_WORDS[finding.retry]}",
    ]
    if finding.cascade:
        lines.append(f"cascade   {ranges(finding.cascade, 'rank')} then failed because of it")
    if finding.folded:
        folded = ", ".join(f"{name} {count}" for name, count in finding.folded[:6])
        lines.append(f"folded    lines that follow from it: {folded}")
    return lines + [f"note      {note}" for note in finding.notes]


def _as_data(finding: FailureFinding | None, notes: list[str]) -> dict[str, object]:
    """Return the diagnosis for JSON; ``found`` is false without a known cause."""
    if finding is None:
        return {"found": False, "notes": notes}
    evidence = [
        {key: value for key, value in asdict(line).items() if key not in _NOT_SHOWN}
        for line in finding.evidence
    ]
    return {
        **asdict(finding),
        "evidence": evidence,
        "found": finding.id != UNKNOWN,
        "folded": dict(finding.folded),
        "notes": [*finding.notes, *notes],
        "line": finding.line,
    }
