"""Signs in a log that a program continued after a message: steps, rows, later output, a success."""

import re

from hpcrun.run.failures.catalog import phrases

_STEP = re.compile(
    r"(epoch|step|iter|iteration|update|batch)s?[\"' ]{0,2}[:=#\[(]?[\[( ]{0,3}(\d+)|\|\s*()(\d+)/\d+ \["
)
_WORDS = ("epoch", "step", "iter", "update", "batch", "|")
_ENDS = ("complete", "finish", "success", "done", "ended", " code", " status", " passed")
_ADVANCES = 2
_NUMBER = re.compile(r"[-+]?[\d.]+(?:[eE][-+]?\d+)?%?$")
_COLUMNS = re.compile(r"[\s|,;]+")
_ROW = 300
"""Characters: longer lines are no row of a table."""


def is_row(text: str) -> bool:
    """Return True for a row of a table of numbers, such as a measurement or the losses of an epoch."""
    text = text.strip(" \t|")
    if not text[:1].isdigit() or len(text) > _ROW:
        return False
    columns = _COLUMNS.split(text)
    return len(columns) > 1 and sum(map(bool, map(_NUMBER.match, columns))) * 2 > len(columns)


class Progress:
    """The steps and the output that a log shows, by the order of the lines.

    ``advances``: the number of steps so far. ``rows``: the number of rows of tables. ``output``: the number
    of lines that are ordinary output. ``failed``: the order of the last line with a failure.
    """

    def __init__(self) -> None:
        self.advances = self.rows = self.output = self.failed = self._succeeded = 0
        self._newest: dict[tuple[str, ...], tuple[int, ...]] = {}

    def add(self, text: str, order: int) -> None:
        """Read a line; ``order`` counts the lines of all logs."""
        text = text[-400:].lower()
        # wandb prints a summary after a failure too; indented lines belong to a traceback.
        if text.startswith("wandb:") or (text[:1].isspace() and "|" not in text):
            return
        if text[:1].isdigit() and is_row(text):
            self.rows += 1
        if any(word in text for word in _WORDS):
            steps = {one[1] or one[3]: int(one[2] or one[4]) for one in _STEP.finditer(text)}
            numbers = tuple(steps.values())
            # A repeated step, of another rank or after a restart, is no progress.
            if steps and numbers > self._newest.get(tuple(steps), ()):
                self._newest[tuple(steps)] = numbers
                self.advances += 1
        if any(word in text for word in _ENDS) and phrases("success").search(text):
            self._succeeded = order

    def now(self) -> tuple[int, int, int]:
        """Return the numbers of steps, rows and ordinary lines so far."""
        return self.advances, self.rows, self.output

    def continued(
        self, order: int, before: tuple[int, int, int], *, steps: bool, lines: int | None
    ) -> bool:
        """Return True if the program succeeded or made progress after a line.

        Args:
            order: the order of the line.
            before: :meth:`now` at that line.
            steps: steps count too. A failed program may flush its output after its traceback, and output of
                ranks may overtake a message of the launcher: then only a success counts.
            lines: the number of ordinary lines that count as progress, if no failure follows; None: any
                number of lines is no progress.
        """
        if self._succeeded > max(order, self.failed):
            return True
        advances, rows, output = before
        if steps and self.advances - advances + self.rows - rows >= _ADVANCES:
            return True
        if lines is None or self.failed > order:
            return False
        return self.rows > rows or self.output - output >= lines
