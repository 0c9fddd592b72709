"""The asynchronous line log."""

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from hpcrun.run import streams as line_writer
from hpcrun.run.files import read_lines
from hpcrun.run.streams import LineWriter


@pytest.fixture
def log(tmp_path: Path) -> Iterator[LineWriter]:
    writer = LineWriter(tmp_path / "log")
    yield writer
    writer.close()


def test_after_a_flush_all_lines_are_there_once(log: LineWriter, tmp_path: Path) -> None:
    for n in range(300):
        log.write({"n": n})
        if n % 50 == 0:
            log.flush()
            assert len(read_lines(tmp_path / "log")) == n + 1
    log.close()
    assert [line["n"] for line in read_lines(tmp_path / "log")] == list(range(300))


def test_frequent_lines_share_a_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    appended: list[int] = []
    append = line_writer.append_lines

    def counting(path: Path, lines: bytes) -> None:
        appended.append(lines.count(b"\n"))
        append(path, lines)

    monkeypatch.setattr(line_writer, "append_lines", counting)
    log = LineWriter(tmp_path / "log", pause=3600.0)
    for n in range(2500):
        log.write({"n": n})
    log.close()
    assert sum(appended) == 2500
    # All writes but the thread's first: a write when a thousand lines wait, and a write for the rest.
    assert len(appended) <= 4
    assert max(appended) <= 1001


def test_a_write_error_raises_in_the_caller_of_write(tmp_path: Path) -> None:
    log = LineWriter(tmp_path / "log")

    def say(n: int) -> None:
        log.write({"n": n})
        log.flush()

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        for _ in range(2):
            with pytest.raises(OSError, match="File too large"):
                say(1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    say(2)
    log.close()
    assert read_lines(tmp_path / "log") == [{"n": 2}]


def test_a_forked_child_writes_no_line_again(tmp_path: Path) -> None:
    log = LineWriter(tmp_path / "log", pause=3600.0)
    log.write({"n": 1})
    log.flush()
    log.write({"n": 2})
    child = os.fork()
    if child == 0:
        try:
            log.close()
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    log.flush()
    log.close()
    assert [line["n"] for line in read_lines(tmp_path / "log")] == [1, 2]
