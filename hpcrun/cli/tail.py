"""Read files that grow, one whole line at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path

from hpcrun.run.io.files import open_regular


class Tail:
    """Yields the lines that were added to ``path`` since the last read. The file may be created later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[bytes]:
        """Yield the new whole lines without their ends; an unfinished line is kept for the next read."""
        try:
            with open_regular(self._path) as stream:
                stream.seek(self._offset)
                new = stream.read()
        except FileNotFoundError:
            return
        *lines, rest = new.split(b"\n")
        self._offset += len(new) - len(rest)
        yield from lines

    def last(self) -> Iterator[bytes]:
        """Yield the new whole lines and an unfinished last line, which no process will complete."""
        yield from self.read()
        try:
            with open_regular(self._path) as stream:
                stream.seek(self._offset)
                rest = stream.read()
        except FileNotFoundError:
            return
        self._offset += len(rest)
        if rest:
            yield from rest.removesuffix(b"\n").split(b"\n")

    def skip(self) -> None:
        """Skip the present content."""
        for _ in self.read():
            continue

    def skip_to_last(self, wanted: Callable[[bytes], bool]) -> None:
        """Skip everything up to and including the last line that is ``wanted``."""
        start = offset = self._offset
        for line in self.read():
            offset += len(line) + 1
            if wanted(line):
                start = offset
        self._offset = start
