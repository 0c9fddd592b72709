"""Results of the runs of the program ``runs.py``."""

import json

from hpcrun.run.directory import RunDirectory
from hpcrun.run.endings import read_failures
from hpcrun.run.events import read_events


class Runs:
    """The results of every run, by name."""

    def __init__(self, folder):
        self._folder = folder
        self._outcomes = json.loads((folder / "outcomes.json").read_text())

    def codes(self, name):
        return self._outcomes[name]["codes"]

    def seconds(self, name):
        return self._outcomes[name]["seconds"]

    def run(self, name):
        return RunDirectory(self._folder / name)

    def said(self, name, rank=0):
        return (self._folder / f"{name}-logs" / f"rank-{rank}.log").read_text()

    def refusal(self, name):
        """Return the line that rank 0 prints in addition to the greeting.

        The event log has this line as well. Rank 1 prints no line of hpcrun; torch's C++ code may warn there
        about a connection that rank 0 has closed.
        """
        lines = [line for line in self.said(name).splitlines() if "over gloo" not in line]
        assert len(lines) == 1, lines
        told = self.said(name, rank=1)
        assert "hpcrun" not in told, told
        assert "Traceback" not in told, told
        line = lines[0].removeprefix("hpcrun: ")
        (event,) = (one for one in read_events(self.run(name)) if one.what == "bad-input")
        assert event.fields["reason"] == line
        return line

    def failures(self, name):
        folder = self.run(name).attempt_logs(name, 0)
        return {failure.rank: failure for failure in read_failures(folder)}

    def kinds(self, name):
        """Allow for both ranks failing: a rank may be gone before the other rank has its last gradients."""
        return {failure.kind for failure in self.failures(name).values()}
