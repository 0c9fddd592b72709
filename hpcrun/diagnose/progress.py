"""Signs in a log that a program continued after a message: its words, later steps, or a success."""

import re

from hpcrun.diagnose.catalog import phrases

_STEP = re.compile(
    r"(epoch|step|iter|iteration|update|batch)s?[\"' ]{0,2}[:=#\[(]?[\[( ]{0,3}(\d+)|\|\s*()(\d+)/\d+ \["
)
_WORDS = ("epoch", "step", "iter", "update", "batch", "|")
_ENDS = ("complete", "finish", "success", "done", "ended", " code", " status", " passed")
_ADVANCES = 2


def is_warning(text: str) -> bool:
    """Return True for a line that its program labels as a warning or as information."""
    return bool(phrases("warning").search(text[:160]) and not phrases("serious").search(text))


class Progress:
    """The steps that a log shows. ``failed``: the order of the last line with a failure."""

    def __init__(self) -> None:
        self.advances = self.failed = self._succeeded = 0
        self._newest: dict[tuple[str, ...], tuple[int, ...]] = {}

    def add(self, text: str, order: int) -> None:
        """Read a line; ``order`` counts the lines of all logs."""
        text = text[-400:].lower()
        # wandb prints a summary after a failure too; indented lines belong to a traceback.
        if text.startswith("wandb:") or (text[:1].isspace() and "|" not in text):
            return
        if any(word in text for word in _WORDS):
            steps = {one[1] or one[3]: int(one[2] or one[4]) for one in _STEP.finditer(text)}
            numbers = tuple(steps.values())
            # A repeated step, of another rank or after a restart, is no progress.
            if steps and numbers > self._newest.get(tuple(steps), ()):
                self._newest[tuple(steps)] = numbers
                self.advances += 1
        if any(word in text for word in _ENDS) and phrases("success").search(text):
            self._succeeded = order

    def continued(self, order: int, advances: int, *, steps: bool) -> bool:
        """Return True if the program succeeded or made progress after a line.

        Args:
            advances: the value at that line.
            steps: steps count too. A failed program may flush its output after its traceback, and output of
                ranks may overtake a message of the launcher: then only a success counts.
        """
        succeeded = self._succeeded > max(order, self.failed)
        return succeeded or (steps and self.advances - advances >= _ADVANCES)
