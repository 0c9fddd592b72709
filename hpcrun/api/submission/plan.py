"""The plan of a submission: the run, the config, the executor, and how the run begins or continues."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from hpcrun.api.submission.checks.checklist import check_submission
from hpcrun.api.submission.checks.concern import Submission
from hpcrun.api.submission.choose_config import (
    SubmitRequest,
    check_site,
    choose_config,
    config_layers,
    require_packages,
    say_idle,
    warn_of,
)
from hpcrun.config import (
    Config,
    Layer,
    file_layer,
    load_resolved,
    locate,
)
from hpcrun.config.tasks import options_for
from hpcrun.errors import UserError
from hpcrun.printing import say_aside
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import without_comment_crc
from hpcrun.slurm.launch.planned import choose_executor

if TYPE_CHECKING:
    from hpcrun.slurm.launch.submitted import ExecutorName

# Seconds for each answer of the scheduler: without one, its limits are not checked.
_PATIENCE = 1.0


@dataclass(frozen=True)
class SubmissionPlan:
    """A checked submission that has not begun: nothing is written yet.

    ``start``: ``new`` makes the run directory; ``again`` continues a run by a config; ``resume`` continues it
    as it was submitted. ``finished``: the result of a finished run, for which nothing is submitted.
    """

    request: SubmitRequest
    run: RunDirectory
    config: Config
    executor: "ExecutorName"
    start: Literal["new", "again", "resume"]
    finished: dict[str, object] | None = None

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
    finished: dict[str, object] | None = None
    saved = False
    # What only an existing run needs is not imported for a new run.
    if any(run.path.parent.glob(f"{config.name}*")):
        from hpcrun.api.submission.continuing import compare, numbered, saved_steps

        if not any("name" in layer.values for layer in layers[1:]):
            run = numbered(run, config)
            config = config.model_copy(update={"name": run.path.name})
        if run.exists():
            finished, saved = compare(run, config), bool(saved_steps(run))
    if finished is None:
        if config.command:
            from hpcrun.config.commands.command import check_command

            check_command(config, Path.cwd())
        elif not saved:
            _require_weights(config)
    executor: ExecutorName = "prepared" if request.prepare else permitted_executor(config, layers)
    if finished is None:
        check(config, executor, layers)
        if config.job.image is not None:
            from hpcrun.slurm.containers import check_image

            check_image(config.job, run, Path.cwd(), here=executor == "local")
    say_idle(request, executor)
    start: Literal["new", "again"] = "again" if run.exists() else "new"
    return SubmissionPlan(request, run, config, executor, start, finished)


def check(
    config: Config, executor: "ExecutorName", layers: Sequence[Layer], *, resumed: bool = False
) -> None:
    """Print the lines of the checks of a submission; raises ConfigError if one refuses it."""
    offer = None
    if executor == "slurm":
        from hpcrun.slurm.nodes import cluster_offer

        offer = cluster_offer(_PATIENCE)
    submission = Submission(config, Path.cwd(), offer)
    check_submission(submission, locate(layers), resumed=resumed)


def permitted_executor(config: Config, layers: Sequence[Layer]) -> "ExecutorName":
    """Return the executor of ``config``, from ``layers``; raises UserError if the site forbids it."""
    executor = choose_executor(config)
    if config.job.executor == "auto":
        check_site(config, layers, executor)
    return executor


def _require_weights(config: Config) -> None:
    """Raise UserError if a task's ``train.init_from`` is of another model, or missing and not made later."""
    source, job = config.train.init_from, config.job
    if source is None:
        return
    if options_for(config.task) is not None:
        from hpcrun.config.tasks.hugging_face import require_same
        from hpcrun.config.tasks.language_model import LanguageModelShape

        require_same(LanguageModelShape.model_validate(config.model.own), Path(source))
    made_later = job.setup or job.node_setup or job.container or job.image
    if made_later or Path(source).exists():
        return
    # An absolute path may be on the nodes only.
    if not Path(source).is_absolute() or job.executor in ("local", "debug"):
        raise UserError(f"train.init_from: {source} does not exist in {Path.cwd()}; check the path")


def plan_resume(run: RunDirectory, request: SubmitRequest) -> SubmissionPlan:
    """Return the plan to continue ``run`` as it was submitted, unless it is finished.

    Raises:
        UserError: the config cannot be read, breaks a rule of the site, or this machine cannot run it.
    """
    from hpcrun.api.submission.continuing import finished_result

    config = load_resolved(run.config)
    if not without_comment_crc(run.config.read_text())[1]:
        say_aside(f"hpcrun: {run.config}: was changed after hpcrun wrote it; its values count")
    check_site(config, [file_layer(run.config)])
    executor = permitted_executor(config, [file_layer(run.config)])
    finished = finished_result(run)
    if finished is None:
        check(config, executor, [file_layer(run.config)], resumed=True)
    return SubmissionPlan(request, run, config, executor, "resume", finished)
