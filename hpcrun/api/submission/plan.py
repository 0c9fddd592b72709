"""The plan of a submission: the run, the config, the executor, and how the run begins or continues."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcrun.api.places import runs_folder
from hpcrun.api.submission.choose_config import (
    SubmitRequest,
    choose_config,
    config_layers,
    idle_on_this_machine,
    require_packages,
    warn_of,
)
from hpcrun.config import Config, load_resolved, masked_words, to_yaml
from hpcrun.job.command import check_command
from hpcrun.printing import say_aside
from hpcrun.run import directory
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json, without_comment_crc
from hpcrun.slurm.launch import submission
from hpcrun.slurm.launch.batch_script import wanted_cluster
from hpcrun.slurm.launch.slurm_jobs import ExecutorName, Submitted

if TYPE_CHECKING:
    from hpcrun.api.submission.continuing import Standing

Admit = Callable[[], AbstractContextManager[Sequence[str]]]


@dataclass(frozen=True)
class SubmissionPlan:
    """A checked submission that has not begun: nothing is written yet.

    ``finished``: the result of a finished run, for which nothing is submitted. ``replaced``: the differences
    from the run's config, if this config replaces it. ``admit`` and ``make``: see
    :func:`hpcrun.api.submission.handover.hand_over`. ``snapshot``: keep a copy of the code; None: as before.
    """

    run: RunDirectory
    config: Config
    executor: ExecutorName
    admit: Admit
    make: Callable[[], object] | None = None
    finished: dict[str, Any] | None = None
    replaced: Sequence[str] = ()
    snapshot: bool | None = None

    def waits_for(self, named: Sequence[str] | None, runs: Path) -> list[RunDirectory]:
        """Return the runs that must finish first.

        Args:
            named: names or paths of runs; None: those of the previous submission.
            runs: the folder of the runs.

        Raises:
            UserError: a run is not there, or will never finish.
        """
        if named is not None and not named:
            return []
        from hpcrun.slurm.launch import jobs
        from hpcrun.slurm.launch.stopping import unfinished_runs

        found = (
            jobs.waited_for(self.run)
            if named is None
            else [directory.find(name, runs) for name in named]
        )
        return unfinished_runs(found, self.executor, wanted_cluster(self.config.job))

    def carry_out(
        self, after: Sequence[RunDirectory] = (), *, trust_owner: bool = False
    ) -> Submitted | None:
        """Submit the run; None for the executors ``debug`` and ``prepared``.

        Args:
            after: runs that must finish first.
            trust_owner: continue a run of another user.

        Raises:
            UserError: see :func:`hpcrun.api.submission.handover.hand_over`.
        """
        from hpcrun.api.submission.handover import hand_over

        return hand_over(
            self.run,
            self.config,
            self.executor,
            admit=self.admit,
            make=self.make,
            snapshot=self.snapshot,
            after=after,
            trust_owner=trust_owner,
        )

    def require_packages(self) -> None:
        """Raise UserError if a package is missing; not for a prepared run, which may get other packages."""
        if self.executor != "prepared":
            require_packages(self.config)


def plan_submission(
    request: SubmitRequest, *, scratch: bool = False, prepare: bool = False, snapshot: bool = True
) -> SubmissionPlan:
    """Return the plan for ``request``.

    Args:
        scratch: an existing run begins at step 0 again.
        prepare: make the run directory, and start nothing.
        snapshot: keep a copy of the code.

    Raises:
        UserError: the config is wrong, or the run of the given name trains something else.
    """
    layers = config_layers(request)
    config = choose_config(request, layers)
    assert config.name is not None
    warn_of(config.job.env)
    run = RunDirectory((request.runs or runs_folder()) / config.name)
    standing: Standing | None = None
    # What only an existing run needs is not imported for a new run.
    if any(run.path.parent.glob(f"{config.name}*")):
        from hpcrun.api.submission.continuing import numbered, standing_of

        if any("name" in layer.values for layer in layers[1:]):
            standing = standing_of(run, config, scratch)
        else:
            run, standing = numbered(run, config, scratch)
            config = config.model_copy(update={"name": run.path.name})
    if standing is None or standing.finished is None:
        check_command(config, Path.cwd())
    executor: ExecutorName = "prepared" if prepare else submission.choose_executor(config)
    idle = idle_on_this_machine(request) if executor in ("local", "debug") else []
    if idle:
        say_aside(
            f"hpcrun: {', '.join(idle)}: no effect on this machine (job.executor is {executor})"
        )
    folder = Path.cwd()

    def identity() -> tuple[dict[str, Any], str]:
        from hpcrun.run import record

        facts = record.describe(masked_words([*sys.orig_argv]), executor, folder)
        return facts, record.uncommitted_diff(folder)

    def make() -> None:
        directory.create(run.path, to_yaml(config), *identity())

    def admit() -> AbstractContextManager[Sequence[str]]:
        if standing is None:
            return nullcontext(())
        from hpcrun.api.submission.continuing import from_scratch, renewed

        return from_scratch(run, config) if scratch else renewed(run, config, identity)

    return SubmissionPlan(
        run,
        config,
        executor,
        admit,
        make if standing is None else None,
        None if standing is None else standing.finished,
        () if standing is None else standing.replaced,
        snapshot,
    )


def finished_result(run: RunDirectory) -> dict[str, Any] | None:
    """Return the result of ``run`` if it is finished; else None."""
    result = read_json(run.result)
    return result if result is not None and result.get("state") == "finished" else None


def plan_resume(
    run: RunDirectory, *, scratch: bool = False, snapshot: bool | None = None
) -> SubmissionPlan:
    """Return the plan to continue ``run`` as it was submitted.

    Args:
        scratch: begin at step 0 again.
        snapshot: keep a copy of the code; None: as in the previous submission.

    Raises:
        UserError: the config cannot be read, or this machine cannot run it.
    """
    from hpcrun.api.submission.continuing import from_scratch, unchanged

    config = load_resolved(run.config)
    if not without_comment_crc(run.config.read_text())[1]:
        say_aside(f"hpcrun: {run.config}: was changed after hpcrun wrote it; its values count")
    executor = submission.choose_executor(config)
    admit = from_scratch if scratch else unchanged
    return SubmissionPlan(run, config, executor, lambda: admit(run, config), snapshot=snapshot)
