"""Atomic replacement and torn lines."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrun.run.io.files import (
    append_line,
    read_json,
    read_lines,
    write_atomic,
    write_hashed,
    write_json,
)


def test_a_replaced_file_is_private_and_leaves_no_temporary(tmp_path: Path) -> None:
    write_atomic(tmp_path / "a", "one")
    write_atomic(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_text() == "two"
    assert [entry.name for entry in tmp_path.iterdir()] == ["a"]
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600


def test_a_write_killed_at_any_moment_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    write_json(target, {"n": -1})
    code = (
        "import sys; from pathlib import Path; from hpcrun.run.io.files import write_json\n"
        "n = 0\n"
        "while True:\n    write_json(Path(sys.argv[1]), {'n': n, 'pad': 'x' * 20000}); n += 1\n"
    )
    for delay in (0.15, 0.2, 0.25):
        writer = subprocess.Popen([sys.executable, "-c", code, str(target)])
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                writer.wait(delay)
        finally:
            writer.kill()
            writer.wait()
        assert isinstance((read_json(target) or {})["n"], int)


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_atomic(tmp_path / "a", "old")

    def refuse(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(OSError, match="No space"):
        write_atomic(tmp_path / "a", "new")
    assert (tmp_path / "a").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1


def test_a_number_that_is_not_finite_becomes_null(tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    value = {"loss": float("nan"), "norms": [1.5, float("inf")], "step": 3}
    append_line(tmp_path / "log", value)
    write_json(tmp_path / "file", value)
    for name in ("log", "file"):
        read = json.loads((tmp_path / name).read_text(), parse_constant=refuse)
        read.pop("_crc32", None)
        assert read == {"loss": None, "norms": [1.5, None], "step": 3}


@pytest.mark.parametrize("old", [b'"loss":0.25', b'"step":3'])
def test_a_flipped_bit_makes_a_line_and_a_file_damaged(tmp_path: Path, old: bytes) -> None:
    value = {"step": 3, "loss": 0.25, "text": "\udc80é"}
    append_line(tmp_path / "log", value)
    write_hashed(tmp_path / "file", value)
    assert read_lines(tmp_path / "log") == [value]
    assert read_json(tmp_path / "file") == value
    flipped = old[:-1] + bytes([old[-1] ^ 1])
    for name in ("log", "file"):
        text = (tmp_path / name).read_bytes().replace(b'": ', b'":')
        assert old in text
        (tmp_path / name).write_bytes(text.replace(old, flipped))
    assert read_lines(tmp_path / "log") == []
    assert read_json(tmp_path / "file") is None


def test_a_torn_last_line_is_skipped_and_the_next_line_is_whole(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    append_line(log, {"n": 1})
    with log.open("ab") as stream:
        stream.write(b'{"n": 2, "tex')
    assert read_lines(log) == [{"n": 1}]
    append_line(log, {"n": 3})
    assert read_lines(log) == [{"n": 1}, {"n": 3}]


def test_lines_of_many_writers_do_not_mix(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"

    def write(writer: int) -> None:
        for n in range(50):
            append_line(log, {"writer": writer, "n": n, "pad": "x" * 200})

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(write, range(8)))
    # A reader may see half a line; the next writer ends it with an empty line, which readers skip.
    lines = [json.loads(line) for line in log.read_text().splitlines() if line]
    assert len(lines) == 400
    for writer in range(8):
        assert [line["n"] for line in lines if line["writer"] == writer] == list(range(50))


def test_names_that_are_not_utf8_survive_in_both_kinds_of_file(tmp_path: Path) -> None:
    name = os.fsdecode(b"caf\xe9")
    write_json(tmp_path / "one.json", {"path": name})
    append_line(tmp_path / "lines.jsonl", {"path": name})
    assert read_json(tmp_path / "one.json") == {"path": name}
    assert read_lines(tmp_path / "lines.jsonl") == [{"path": name}]
