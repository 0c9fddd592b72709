"""Atomic replacement and torn lines."""

import errno
import json
import os
import resource
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from hpcrun.exit_codes import FAILED
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import create
from hpcrun.run.files import (
    append_line,
    end_of,
    read_json,
    read_lines,
    write_atomic,
    write_hashed,
    write_json,
)
from hpcrun.run.streams import copied_to
from hpcrun.train.failures import fail
from hpcrun.train.position import Position
from tests.support.kills import killed_at_each_step
from tests.support.training.forks import fork_ranks


def test_a_killed_write_leaves_the_old_or_the_new_file(tmp_path: Path) -> None:
    target = tmp_path / "state.json"
    old, new = {"n": -1}, {"n": 1, "pad": "x" * 2000}
    write_json(target, old)
    drafts = 0
    for place in killed_at_each_step(lambda: write_json(target, new)):
        assert read_json(target) in (old, new), place
        drafts += len([*tmp_path.glob(".state.json.*.tmp")])
        # The next writer of the file removes the draft.
        write_json(target, old)
        assert [*tmp_path.iterdir()] == [target], place
    assert drafts >= 4
    assert read_json(target) == new


def test_a_failed_write_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (b"older", "old"):
        write_atomic(tmp_path / "a", text)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600

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


def test_a_flipped_bit_in_a_hash_key_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for value in ({"step": 3}, {}):
        write_hashed(path, value)
        written = path.read_bytes()
        path.write_bytes(written.replace(b"sha256", b"sha356"))
        assert read_json(path) is None
        # An editor that changes a value removes the line.
        lines = written.splitlines()
        path.write_bytes(b"\n".join(line for line in lines if b"sha256" not in line))
        assert value == {} or read_json(path) == value
    write_json(path, {"key": "f" * 64, "step": 3})
    assert read_json(path) == {"key": "f" * 64, "step": 3}


def test_a_torn_last_line_is_skipped(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("read", [read_json, read_lines])
def test_a_special_file_is_refused_and_does_not_block(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    with pytest.raises(OSError, match=r"Not a regular file; remove it: .*events"):
        read(path)
    with pytest.raises(OSError, match="Not a regular file"):
        read(Path("/dev/zero"))
    assert end_of(path, 10) == b""
    with pytest.raises(OSError, match="Not a regular file"):
        append_line(path, {})


def test_a_disk_error_names_its_file_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = create(tmp_path / "run", "{}\n", {})

    def fill_the_disk(_: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(OSError, match="No space left") as raised:
            append_line(run.events, {"pad": "x" * 200}, durable=True)
        assert raised.value.filename == str(run.events)
        with copied_to(tmp_path / "rank.log"):
            for _line in range(30):
                print("a line that the log loses when it is full")

    assert fork_ranks(1, fill_the_disk) == [0]
    error = OSError(errno.EIO, "Input/output error", str(run.events))
    assert fail(run, Attempt("7", 0), 0, error, Position()) == FAILED
    line = f"hpcrun: rank 0: {run.events}: Input/output error; check its owner and the free space"
    assert capsys.readouterr().err.splitlines()[-1:] == [line]
