"""`hpcrun netcheck`: command lines and their output."""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.test_bad_input import require_one_line
from tests.support import jobs

QUICK = ("--seconds", "0.2", "--streams", "1", "--all-reduce", "0")


def test_a_report_of_this_machine(tmp_path: Path) -> None:
    done = jobs.hpcrun("netcheck", "--local", "3", "--links", *QUICK, cwd=tmp_path)
    assert done.returncode in (0, 1), done.stderr
    lines = done.stdout.splitlines()
    assert lines[0].split() == ["node", "rate", "score", "resent", "round", "trip"]
    header = next(number for number, line in enumerate(lines) if line.startswith("from"))
    assert lines[header].split() == ["from", "to", "rate", "round", "trip", "resent"]
    ways = [tuple(line.split()[:2]) for line in lines[header + 1 : header + 7]]
    nodes = [f"127.0.0.{number}" for number in (1, 2, 3)]
    assert set(itertools.permutations(nodes, 2)) <= set(ways) | {
        tuple(line.split()[:2]) for line in lines[header + 7 :]
    }
    assert all("bit/s" in line for line in lines[header + 1 : header + 7])
    assert done.stderr == ""


def test_the_front_end_prints_json(tmp_path: Path) -> None:
    program = Path(__file__).parents[2] / "tools" / "netcheck.py"
    command = [sys.executable, str(program), "--local", "2", *QUICK, "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    report = json.loads(done.stdout)
    assert done.returncode == bool(report["findings"])
    assert [node["name"] for node in report["nodes"]] == ["127.0.0.1", "127.0.0.2"]
    assert report["usual_bits_per_second"] > 0


def test_the_all_reduce_is_a_line_of_the_report(tmp_path: Path) -> None:
    words = ("--seconds", "0.2", "--all-reduce", "300")
    done = jobs.hpcrun("netcheck", "--local", "2", *words, cwd=tmp_path)
    (line,) = [one for one in done.stdout.splitlines() if one.startswith("all-reduce")]
    assert line.startswith("all-reduce over 2 nodes (gloo, 2 ranks): ")
    assert line.endswith(" GB/s")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--local 4"),
        (["--local", "1"], "2 to 64"),
        (["--seconds", "0"], "--seconds 0"),
        (["--streams", "0"], "--streams 0"),
        (["--all-reduce", "-1"], "--all-reduce -1"),
        (["--rdma", "-1"], "--rdma -1"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: list[str], expected: str) -> None:
    require_one_line(jobs.hpcrun("netcheck", *words, cwd=tmp_path), expected)
