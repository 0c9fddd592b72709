"""Reading files that grow, a whole line at a time."""

from collections.abc import Callable, Iterator
from pathlib import Path


class Tail:
    """Gives the lines that have been added to ``path`` since the last look. The file may come later."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def read(self) -> Iterator[bytes]:
        """The whole lines that are new, without their ends; a line under way waits for its end."""
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                new = stream.read()
        except FileNotFoundError:
            return
        *lines, rest = new.split(b"\n")
        self._offset += len(new) - len(rest)
        yield from lines

    def last(self) -> Iterator[bytes]:
        """The whole lines that are new, and what is left behind them: nobody will end that line."""
        yield from self.read()
        try:
            with self._path.open("rb") as stream:
                stream.seek(self._offset)
                rest = stream.read()
        except FileNotFoundError:
            return
        self._offset += len(rest)
        if rest:
            yield from rest.removesuffix(b"\n").split(b"\n")

    def skip(self) -> None:
        """Pass over everything there is."""
        for _ in self.read():
            continue

    def skip_to_last(self, wanted: Callable[[bytes], bool]) -> None:
        """Pass over everything up to and including the last line that is ``wanted``."""
        start = offset = self._offset
        for line in self.read():
            offset += len(line) + 1
            if wanted(line):
                start = offset
        self._offset = start
