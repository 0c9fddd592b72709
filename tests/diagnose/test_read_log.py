"""Logs of any size are read in bounded memory, with the right line numbers."""

import io
import tracemalloc
from pathlib import Path

from hpcrun.diagnose.finding import find_cause
from hpcrun.diagnose.read_log import read_log, read_stream


def test_short_logs_are_read_whole(tmp_path: Path) -> None:
    log = tmp_path / "rank-00003.log"
    log.write_bytes(b"one\r\ntwo\nthree")
    lines = list(read_log(log))
    assert [(line.line, line.text, line.rank) for line in lines] == [
        (1, "one", 3),
        (2, "two", 3),
        (3, "three", 3),
    ]
    assert list(read_stream(io.BytesIO(b""), "-")) == []


def test_the_middle_of_a_long_log_is_skipped_and_counted() -> None:
    data = b"".join(b"line %d\n" % number for number in range(1, 400_001))
    lines = list(read_stream(io.BytesIO(data), "-", head=1000, tail=1 << 20))
    assert lines[0].text == "line 1"
    assert lines[-1].text == "line 400000"
    whole = [line for line in lines if line.text.startswith("line ")]
    # If the kept part begins within a line, the rest of that line is one line with the right number.
    assert all(int(line.text[5:]) == line.line for line in whole)
    assert len(lines) < 250_000


def test_memory_stays_bounded_for_a_log_of_100_mb(tmp_path: Path) -> None:
    log = tmp_path / "job.log"
    with log.open("wb") as stream:
        stream.write(b"start\n")
        for _ in range(100):
            stream.write(b"nothing happens here, again and again\n" * 27_000)
        stream.write(b"OSError: [Errno 122] Disk quota exceeded\n")
    tracemalloc.start()
    found = find_cause(read_log(log, head=1 << 18, tail=1 << 20))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is not None
    assert found.id == "quota"
    assert found.evidence[0].line == 100 * 27_000 + 2
    assert peak < 16 << 20


def test_a_line_without_end_is_cut() -> None:
    (line,) = read_stream(io.BytesIO(b"x" * 3_000_000), "-")
    assert len(line.text) < 20_000


def test_repeated_lines_are_skipped_but_not_at_the_end(tmp_path: Path) -> None:
    log = tmp_path / "noisy.log"
    odd = "OSError: [Errno 122] Disk quota exceeded"
    with log.open("w") as stream:
        stream.writelines(
            f"RuntimeError: CUDA error: misaligned address {n}\n" for n in range(30_000)
        )
        stream.write(f"{odd}\n")
        stream.writelines(
            f"RuntimeError: CUDA error: misaligned address {n}\n" for n in range(30_000)
        )
    lines = list(read_log(log))
    assert 5_000 < len(lines) < 7_000
    assert [line.line for line in lines if line.text == odd] == [30_001]
    assert lines[-1].line == 60_001
    assert lines[-1].until is not None


def test_repeated_lines_of_every_rank_are_read(tmp_path: Path) -> None:
    log = tmp_path / "noisy.log"
    with log.open("w") as stream:
        for rank in range(64):
            stream.writelines(f"[rank{rank}]: the address {n} is odd\n" for n in range(400))
        stream.writelines(f"step {n} loss {n}.5\n" for n in range(8_000))
    lines = list(read_log(log))
    assert {line.rank for line in lines} == {None, *range(64)}
    assert len(lines) < 14_000


def test_colors_hide_no_message() -> None:
    (line,) = read_stream(io.BytesIO(b"\x1b[1;31m[rank3]:\x1b[0m \x1b[31mKilled\x1b[0m"), "-")
    assert (line.rank, line.text) == (3, "Killed")
