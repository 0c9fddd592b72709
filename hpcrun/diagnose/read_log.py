"""Read logs of any size in bounded memory: only their beginning and end."""

import re
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from hpcrun.diagnose.log_line import LogLine, labeled

HEAD, TAIL = 4 << 20, 32 << 20
"""Bytes: a log begins with the errors of a start, and ends with the errors of an end."""

_BLOCK = 1 << 20
_LONGEST = 16_384
"""Characters of a line: longer lines (binary data, progress bars) keep only their two ends."""

_RANK_FILE = re.compile(
    r"(?:rank|task|local_rank|stdout|stderr)[-_.]?(\d{1,6})\.(?:log|out|err|txt)$"
)


def read_log(
    path: Path, *, shown: str | None = None, head: int = HEAD, tail: int = TAIL
) -> Iterator[LogLine]:
    """Yield the lines of ``path``, at most ``head`` bytes from its beginning and ``tail`` from its end.

    Args:
        shown: the name of the file in the lines; None: ``path``.

    Raises:
        OSError: the file cannot be read.
    """
    rank = _RANK_FILE.search(path.name)
    with path.open("rb") as stream:
        yield from read_stream(
            stream, shown or str(path), rank=int(rank[1]) if rank else None, head=head, tail=tail
        )


def read_stream(
    stream: BinaryIO, name: str, *, rank: int | None = None, head: int = HEAD, tail: int = TAIL
) -> Iterator[LogLine]:
    """Read a stream that may not be a file; like :func:`read_log`."""
    number = 0
    rest = b""
    read = 0
    while read < head and (block := stream.read(min(_BLOCK, head - read))):
        read += len(block)
        *lines, rest = (rest + block).split(b"\n")
        for text in lines:
            number += 1
            yield _line(text, name, number, rank)
    kept, skipped = _last_blocks(stream, rest, tail)
    number += skipped
    for position, block in enumerate(kept):
        last = position == len(kept) - 1
        *lines, left = block.split(b"\n")
        if position + 1 < len(kept):
            kept[position + 1] = left + kept[position + 1]
        elif last and left:
            lines.append(left)
        for text in lines:
            number += 1
            yield _line(text, name, number, rank)


def _last_blocks(stream: BinaryIO, rest: bytes, tail: int) -> tuple[list[bytes], int]:
    """Return the last ``tail`` bytes, and the number of line ends that were skipped."""
    blocks: deque[bytes] = deque([rest])
    size, skipped = len(rest), 0
    while block := stream.read(_BLOCK):
        blocks.append(block)
        size += len(block)
        while size - len(blocks[0]) >= tail:
            passed = blocks.popleft()
            size -= len(passed)
            skipped += passed.count(b"\n")
    return list(blocks), skipped


def _line(raw: bytes, name: str, number: int, rank: int | None) -> LogLine:
    text = raw.decode(errors="replace").rstrip("\r").replace("\r", " ")
    if len(text) > _LONGEST:
        text = f"{text[: _LONGEST // 2]} … {text[-_LONGEST // 2 :]}"
    return labeled(text, name, number, rank)
