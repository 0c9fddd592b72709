"""A launcher for hydra's multiruns: ``hydra/launcher=hpcrun`` submits each job as a run, and detaches.

A run is the user's program with the overrides of its job, so nothing is pickled, and a restart runs the same
command with the same output directory.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import field, make_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from omegaconf import DictConfig, OmegaConf, open_dict

import hpcrun
from hpcrun.printing import say, say_aside

OPTIONS = (
    *("runs_dir", "nodes", "gpus", "tasks_per_node", "launcher", "cpu", "time", "partition"),
    *("account", "qos", "constraint", "reservation", "exclude", "exclusive", "mem"),
    *("cpus_per_task", "executor", "profile", "snapshot"),
)
"""The arguments of ``hpcrun.submit`` that are keys of ``hydra.launcher``; the null ones are not passed."""

# hydra keeps the time of its first use, which all jobs of a multirun share.
_NAME = "${hydra.job.name}-${now:%Y%m%d-%H%M%S}"
# Keys that belong to the multirun. The job is a single run, also if the config says multirun.
_OF_THE_MULTIRUN = (
    *("hydra/launcher", "hydra/sweeper", "hydra.launcher", "hydra.sweeper", "hydra.sweep."),
    *("hydra.mode", "hydra.run.dir", "hydra.job.num", "hydra.job.id"),
)

LauncherConfig = make_dataclass(
    "LauncherConfig",
    [
        ("_target_", str, "hydra_plugins.hpcrun_launcher.HpcrunLauncher"),
        ("name", str, _NAME),
        ("wait", bool, False),
        ("overrides", dict[str, Any], field(default_factory=dict)),
        *((name, Any, None) for name in OPTIONS),
    ],
)
"""The keys of ``hydra.launcher``.

``name``: the name of a run without the number of its job. ``overrides``: dotted keys of hpcrun's config, such
as ``job.image``. ``wait``: wait for the end of all runs.
"""

ConfigStore.instance().store(
    group="hydra/launcher", name="hpcrun", node=LauncherConfig, provider="hpcrun"
)


class HpcrunLauncher(Launcher):  # type: ignore[misc, unused-ignore]
    """Submits the jobs of a multirun.

    Args:
        options: the keys of ``hydra.launcher``.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._config: Any = None
        self._context: Any = None

    def setup(self, *, hydra_context: Any, task_function: Any, config: DictConfig) -> None:
        """Keep the config of the multirun; the jobs import the task function themselves."""
        self._config, self._context = config, hydra_context

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Submit a run for each list of overrides, and print its name.

        Returns:
            For each job its run's name as the value. With ``wait``, a run that does not finish has failed.

        Raises:
            SystemExit: a submission is refused (exit code 2). The runs that are printed stay submitted.
        """
        setup_globals()
        runs = []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            try:
                runs.append((self._submit(number, list(overrides)), overrides))
            except hpcrun.UserError as error:
                say_aside(f"hpcrun: job {number} of the multirun: {error}")
                raise SystemExit(2) from error
            say(f"{runs[-1][0].name}  {' '.join(overrides)}")
        return [self._returned(run, overrides) for run, overrides in runs]

    def _submit(self, number: int, overrides: list[str]) -> hpcrun.Run:
        config = self._context.config_loader.load_sweep_config(self._config, overrides)
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        # The interpolations ${hydra:...} read this instance.
        HydraConfig.instance().set_config(config)
        output = Path(config.hydra.sweep.dir, str(config.hydra.sweep.subdir)).absolute()
        kept = [one for one in config.hydra.overrides.hydra if not one.startswith(_OF_THE_MULTIRUN)]
        command = [
            *_program(),
            *_config_flags(sys.argv[1:]),
            *config.hydra.overrides.task,
            *kept,
            *("hydra.mode=RUN", f"hydra.job.num={number}", f"hydra.job.id='{number}'"),
            f"hydra.run.dir={_quoted(str(output))}",
        ]
        options: Any = OmegaConf.to_container(config.hydra.launcher, resolve=True)
        given = {key: options[key] for key in OPTIONS if options[key] is not None}
        name = f"{options['name']}-{number}"
        run = hpcrun.submit(command=command, name=name, overrides=options["overrides"], **given)
        assert isinstance(run, hpcrun.Run)
        return run

    def _returned(self, run: hpcrun.Run, overrides: Sequence[str]) -> JobReturn:
        state = run.wait() if self._options.get("wait") else "finished"
        returned = JobReturn(overrides=overrides, task_name=run.name, status=JobStatus.COMPLETED)
        returned.return_value = run.name
        if state != "finished":
            returned.status = JobStatus.FAILED
            returned.return_value = RuntimeError(
                f"{run.name}: {state}; see `hpcrun doctor {run.name}`"
            )
        return returned


def _program() -> list[str]:
    """Return the words that start this program again."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is not None:
        return [sys.executable, "-m", spec.name.removesuffix(".__main__")]
    return [sys.executable, os.path.relpath(sys.argv[0])]


def _config_flags(arguments: Sequence[str]) -> list[str]:
    """Return the flags among ``arguments`` that choose the config of the program."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for short, long in (
        ("-cp", "--config-path"),
        ("-cn", "--config-name"),
        ("-cd", "--config-dir"),
    ):
        parser.add_argument(short, long)
    given = vars(parser.parse_known_args(arguments)[0])
    return [f"--{key.replace('_', '-')}={value}" for key, value in given.items() if value]


def _quoted(text: str) -> str:
    """Return ``text`` as a quoted value of hydra's override grammar."""
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
