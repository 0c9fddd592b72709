"""The input of a hand-over: a list of runs that start together. A run without siblings is a list of one."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from hpcrun.api.submission import continuing
from hpcrun.api.submission.choose_config import SubmitRequest
from hpcrun.config import Config
from hpcrun.run.directory import RunDirectory, refuse_foreign, refuse_if_writable_by_others
from hpcrun.run.files import digest_of, with_comment_crc
from hpcrun.run.snapshot import Snapshot
from hpcrun.slurm.launch.submitted import ExecutorName

Start = Literal["new", "again", "resume"]
"""The beginning of a run: ``new`` makes its run directory, ``again`` continues it by a config, and ``resume``
as it was submitted."""


@dataclass(frozen=True)
class RunToStart:
    """A run of a hand-over.

    ``text``: the config as YAML. ``facts``: fields of run.json that only this run has.
    """

    run: RunDirectory
    config: Config
    text: str
    start: Start
    facts: Mapping[str, object] = field(default_factory=dict)

    @property
    def number(self) -> int:
        """The number of a run in a folder of several runs."""
        return int(self.run.path.name)

    @property
    def file(self) -> str:
        """The content of the config file."""
        return with_comment_crc(self.text)

    @property
    def digest(self) -> str:
        """The digest of the config file."""
        return digest_of(self.file.encode())

    def require_startable(self) -> None:
        """Raise RunError if the run cannot continue: it is another user's, or was changed since the plan."""
        refuse_if_writable_by_others(self.run)
        refuse_foreign(self.run)
        if self.start == "again":
            continuing.compare(self.run, self.config)
        elif self.start == "resume":
            continuing.require_unchanged(self.run, self.config)


@dataclass(frozen=True)
class RunList:
    """Runs to hand over together.

    ``folder``: has the lock, the copy of the code and the files of ``request``. It is the run directory of
    ``alone``, a run without siblings, or else the folder of all run directories. ``choose``: called under the
    lock; it returns the runs to start, or raises UserError. ``listed``: writes the names of new runs, and
    removes them if its block fails. ``code``: the copy of the code; None: a new copy.
    """

    request: SubmitRequest
    folder: RunDirectory
    executor: ExecutorName
    choose: Callable[[], Sequence[RunToStart]]
    alone: RunToStart | None = None
    listed: Callable[[], AbstractContextManager[None]] = nullcontext
    code: Snapshot | None = None

    @property
    def is_new(self) -> bool:
        """True if the hand-over makes the folder."""
        return self.alone.start == "new" if self.alone else not self.folder.path.exists()
