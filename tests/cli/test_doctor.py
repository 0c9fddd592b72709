"""`hpcrun doctor` on logs of other people's jobs, on Slurm's real output, and on bad input."""

import io
import json
import sys
from pathlib import Path

import pytest

from hpcrun.cli.main import guarded

_RECORDED = Path(__file__).parents[1] / "slurm" / "recorded"


def test_a_log_without_a_failure_has_exit_code_0(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job.log"
    log.write_text("hpcrun: step 1\ndone\n")
    assert guarded(["doctor", str(log)]) == 0
    assert capsys.readouterr().out == "hpcrun: no known failure\n"


def test_a_cause_has_exit_code_1_and_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "slurm-17.out"
    log.write_text("[rank1]: step 1\n[rank1]: OSError: [Errno 122] Disk quota exceeded\n")
    assert guarded(["doctor", str(log)]) == 1
    told = capsys.readouterr().out
    assert f"evidence  {log}:2: OSError: [Errno 122] Disk quota exceeded" in told
    assert "where     rank 1" in told
    assert "retry     a retry is unlikely to help before this is changed" in told


def test_an_unknown_error_is_quoted_without_a_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job.log"
    log.write_text("step 1\nOddError: this never happened before\n")
    assert guarded(["doctor", str(log)]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "hpcrun: no known failure; the last error is",
        f"evidence  {log}:2: OddError: this never happened before",
    ]
    assert guarded(["doctor", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["found"] is False


def test_a_folder_of_logs_is_one_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rank-0.log").write_text("RuntimeError: Connection closed by peer [10.0.0.2]\n")
    (tmp_path / "rank-1.log").write_text("RuntimeError: CUDA error: invalid device ordinal\n")
    assert guarded(["doctor", str(tmp_path), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["id"], found["rank"], found["cascade"]) == ("device-ordinal", 1, [0])


def test_the_standard_input_is_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = io.TextIOWrapper(
        io.BytesIO(b"sbatch: error: Requested node configuration is not available\n")
    )
    monkeypatch.setattr(sys, "stdin", data)
    assert guarded(["doctor", "-"]) == 1
    assert "evidence  -:1: sbatch: error" in capsys.readouterr().out


def test_no_byte_of_a_log_commands_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "job.log"
    log.write_bytes(
        b"Traceback (most recent call last):\nValueError: \x1b]0;owned\x07\x1b[2J\x9b31m\x00 \xff\n"
    )
    assert guarded(["doctor", str(log)]) == 1
    told = capsys.readouterr().out
    assert "owned" in told
    assert all(mark.isprintable() or mark == "\n" for mark in told)
    assert guarded(["doctor", str(log), "--json"]) == 1
    assert capsys.readouterr().out.isascii()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nosuch"], "nosuch: no such log, and no such run; "),
        (["."], ".: contains no logs, and no such run; "),
        (["-", "job.log"], "`-` excludes other sources"),
        (["a.log", "b.log"], "no such log"),
    ],
)
def test_bad_input_has_one_line_and_exit_code_2(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"")))
    assert guarded(["doctor", *arguments]) == 2
    told = capsys.readouterr().err
    assert words in told
    assert len(told.splitlines()) == 1


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("time-limit", "slurm-time-limit"),
        ("preempted", "slurm-preempted"),
        ("node-failure", "slurm-node-failure"),
        ("cancelled", "slurm-cancelled"),
        ("rank-killed", "task-killed"),
    ],
)
def test_the_words_of_real_slurms_are_understood(
    version: str, name: str, cause: str, capsys: pytest.CaptureFixture[str]
) -> None:
    log = _RECORDED / version / f"batch-{name}.txt"
    assert guarded(["doctor", str(log), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["id"] == cause
