"""The plan of a submission: the run, the config, the executor, and how the run begins or continues."""

import os
import sys
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hpcrun.api.submission.choose_config import (
    SubmitRequest,
    choose_config,
    config_layers,
    require_packages,
    say_idle,
    warn_of,
)
from hpcrun.config import Config, Layer, file_layer, load_resolved, masked_words, read_site
from hpcrun.errors import UserError
from hpcrun.job.command import check_command
from hpcrun.printing import say_aside
from hpcrun.run import directory
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json, without_comment_crc
from hpcrun.slurm.containers import check_image
from hpcrun.slurm.launch import submission
from hpcrun.slurm.launch.slurm_jobs import ExecutorName, Submitted
from hpcrun.tasks import options_for
from hpcrun.tasks.hugging_face import require_same
from hpcrun.tasks.options import LanguageModelShape

if TYPE_CHECKING:
    from hpcrun.api.submission.continuing import Standing


@dataclass(frozen=True)
class SubmissionPlan:
    """A checked submission that has not begun: nothing is written yet.

    ``start``: ``new`` makes the run directory; ``again`` continues a run by a config, or replaces its config;
    ``resume`` continues it as it was submitted. ``finished``: the result of a
    finished run, for which nothing is submitted. ``replaced``: the differences from the replaced config.
    """

    request: SubmitRequest
    run: RunDirectory
    config: Config
    executor: ExecutorName
    start: Literal["new", "again", "resume"]
    finished: dict[str, Any] | None = None
    replaced: Sequence[str] = ()

    def waits_for(self) -> list[RunDirectory]:
        """Return the runs that must finish first; raises UserError if one of them never will."""
        return waits_for(self.request, self.executor, self.run)

    def admitted(self) -> AbstractContextManager[Sequence[str]]:
        """Return a context around the submission, in which no other submission of the run can begin.

        It yields the differences from a config that is replaced; raises RunError if the run cannot continue.
        """
        if self.start == "new":
            return nullcontext(())
        from hpcrun.api.submission import continuing

        if self.start == "again":
            return continuing.renewed(self.run, self.config, lambda: identity(self.executor))
        return continuing.unchanged(self.run, self.config)

    def carry_out(self) -> Submitted | None:
        """Submit the run; None for the executors ``debug`` and ``prepared``.

        Raises:
            UserError: a package is missing, or see :func:`hpcrun.api.submission.handover.hand_over`.
        """
        from hpcrun.api.submission.handover import hand_over

        self.require_packages()
        return hand_over(self, self.waits_for())

    def require_packages(self) -> None:
        """Raise UserError if a package is missing; not for a prepared run, which may get other packages."""
        if self.executor != "prepared":
            require_packages(self.config)


def plan_submission(request: SubmitRequest) -> SubmissionPlan:
    """Return the plan for ``request``.

    Raises:
        UserError: the config is wrong, or the run of the given name trains something else.
    """
    if request.max_parallel is not None or request.only_new:
        option = "only_new" if request.max_parallel is None else "max_parallel"
        raise UserError(
            f"{request.place(option)}: is for sweeps only; give the swept keys with "
            f"{request.place('sweep')}"
        )
    layers = config_layers(request)
    config = choose_config(request, layers)
    assert config.name is not None
    warn_of(config.job.env)
    run = RunDirectory(request.runs / config.name)
    standing: Standing | None = None
    # What only an existing run needs is not imported for a new run.
    if any(run.path.parent.glob(f"{config.name}*")):
        from hpcrun.api.submission.continuing import numbered, standing_of

        if any("name" in layer.values for layer in layers[1:]):
            standing = standing_of(run, config)
        else:
            run, standing = numbered(run, config)
            config = config.model_copy(update={"name": run.path.name})
    if standing is None or standing.finished is None:
        check_command(config, Path.cwd())
        if standing is None or not standing.saved:
            _require_weights(config, request)
    executor: ExecutorName = "prepared" if request.prepare else permitted_executor(config, layers)
    if standing is None or standing.finished is None:
        check_image(config.job, run, Path.cwd(), here=executor == "local")
    say_idle(request, executor)
    if standing is None:
        return SubmissionPlan(request, run, config, executor, "new")
    return SubmissionPlan(
        request, run, config, executor, "again", standing.finished, standing.replaced
    )


def permitted_executor(config: Config, layers: Sequence[Layer]) -> ExecutorName:
    """Return the executor of ``config``, from ``layers``; raises UserError if the site forbids it."""
    executor = submission.choose_executor(config)
    if config.job.executor == "auto":
        read_site(os.environ).check(config, layers, executor)
    return executor


def _require_weights(config: Config, request: SubmitRequest) -> None:
    """Raise UserError if ``train.init_from`` is of another model, or is missing and not made later."""
    source, job = config.train.init_from, config.job
    if source is not None and not config.command and options_for(config.task) is not None:
        require_same(LanguageModelShape.model_validate(config.model.own), Path(source))
    made_later = request.after or job.setup or job.node_setup or job.container or job.image
    if source is None or config.command or made_later or Path(source).exists():
        return
    # An absolute path may be on the nodes only.
    if not Path(source).is_absolute() or job.executor in ("local", "debug"):
        raise UserError(f"train.init_from: {source} does not exist in {Path.cwd()}; check the path")


def identity(executor: ExecutorName) -> tuple[dict[str, Any], str]:
    """Return the contents of run.json and uncommitted.patch for a run that begins now."""
    from hpcrun.run import record

    facts = record.describe(masked_words([*sys.orig_argv]), executor, Path.cwd())
    return facts, record.uncommitted_diff(Path.cwd())


def waits_for(
    request: SubmitRequest, executor: ExecutorName, run: RunDirectory | None = None
) -> list[RunDirectory]:
    """Return the runs that ``request`` waits for; without a wish those that ``run`` has waited for.

    Raises:
        UserError: a run is not there, or will never finish.
    """
    if request.after is not None and not request.after:
        return []
    from hpcrun.slurm.launch import jobs
    from hpcrun.slurm.launch.stopping import unfinished_runs

    if request.after is not None:
        found = [directory.find(name, request.runs) for name in request.after]
    else:
        found = [] if run is None else jobs.waited_for(run)
    return unfinished_runs(found, executor)


def finished_result(run: RunDirectory) -> dict[str, Any] | None:
    """Return the result of ``run`` if it is finished; else None."""
    result = read_json(run.result)
    return result if result is not None and result.get("state") == "finished" else None


def plan_resume(run: RunDirectory, request: SubmitRequest) -> SubmissionPlan:
    """Return the plan to continue ``run`` as it was submitted, unless it is finished.

    Raises:
        UserError: the config cannot be read, breaks a rule of the site, or this machine cannot run it.
    """
    config = load_resolved(run.config)
    if not without_comment_crc(run.config.read_text())[1]:
        say_aside(f"hpcrun: {run.config}: was changed after hpcrun wrote it; its values count")
    read_site(os.environ).check(config, [file_layer(run.config)])
    executor = permitted_executor(config, [file_layer(run.config)])
    return SubmissionPlan(request, run, config, executor, "resume", finished_result(run))
