"""W&B: the metric sink, scripts of a run with one W&B run for all attempts, and sweep agents.

``hpcrun submit -- python -m hpcrun.integrations.wandb SWEEP [--count N] -- python train.py`` is an agent of a
W&B sweep. After an interruption, the server of W&B gives the next agent a new trial. This agent keeps the
trial in the run directory, and its next attempt first continues the trial: as the same W&B run, with the same
parameters.
"""

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcrun.errors import UserError
from hpcrun.exit_codes import UNFINISHED
from hpcrun.ports.sinks import Sink, TrainingStart, numbers
from hpcrun.printing import say_aside
from hpcrun.ranks.signals import STOP
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import read_json, write_json
from hpcrun.run.record import wandb_id

_TRIAL = "wandb-trial.json"
_VARIABLES = (
    "WANDB_RUN_ID",
    "WANDB_SWEEP_ID",
    "WANDB_SWEEP_PARAM_PATH",
    "WANDB_ENTITY",
    "WANDB_PROJECT",
)


def continue_wandb_run() -> None:
    """Let ``wandb.init()`` on rank 0 continue the W&B run of the earlier attempts of this run.

    It sets ``WANDB_RUN_ID`` and ``WANDB_RESUME`` unless they are set; outside of a job of hpcrun it does
    nothing.
    """
    run = os.environ.get("HPCRUN_RUN")
    if run is None or os.environ.get("RANK", "0") != "0" or "WANDB_RUN_ID" in os.environ:
        return
    os.environ["WANDB_RUN_ID"] = wandb_id(RunDirectory(Path(run)))
    os.environ.setdefault("WANDB_RESUME", "allow")


class WeightsAndBiases(Sink):
    """One W&B run for all attempts, with an id from the run directory. Skips steps that W&B already has."""

    def __init__(self, training: TrainingStart) -> None:
        """Start W&B; raises UserError if wandb is not installed or does not start, or without a project."""
        project, run = training.config["watch"]["wandb"], RunDirectory(training.run)
        if project is None:
            raise UserError("watch.sinks: wandb needs the project: set watch.wandb instead")
        try:
            import wandb
        except ImportError as error:
            raise UserError(
                "watch.wandb: the package wandb is not installed; `pip install wandb`, or remove the key"
            ) from error
        try:
            self._run: Any = wandb.init(
                project=project,
                id=wandb_id(run),
                name=run.name,
                dir=str(run.path),
                resume="allow",
                config=training.config,
            )
        except Exception as error:
            reason = " ".join(str(error).split())
            raise UserError(
                f"watch.wandb: W&B does not start: {reason}; log in with `wandb login`, or set "
                "job.env.WANDB_MODE=offline and upload the run later with `wandb sync`"
            ) from error
        self._newest = int(self._run.step or 0)

    def write(self, line: Mapping[str, Any]) -> None:
        # W&B accepts only increasing steps; steps repeated after a restart have the same numbers.
        if line["step"] >= self._newest:
            self._newest = line["step"]
            self._run.log(numbers(line), step=line["step"])

    def close(self) -> None:
        self._run.finish()


class Trials:
    """The trials of an agent, one after the other; the current trial is a file in the run directory.

    Args:
        run: the run directory.
        command: the training program and its arguments.
    """

    def __init__(self, run: Path, command: Sequence[str]) -> None:
        self._record, self._command = run / _TRIAL, list(command)
        self._state = read_json(self._record) or {"finished": 0, "trial": None}

    @property
    def finished(self) -> int:
        """Number of trials that have ended."""
        return int(self._state["finished"])

    def begin(self) -> None:
        """Run the trial that W&B's agent has put into the environment."""
        path = os.environ.get("WANDB_SWEEP_PARAM_PATH")
        self._state["trial"] = {
            "variables": {name: os.environ[name] for name in _VARIABLES if name in os.environ},
            "parameters": Path(path).read_text(encoding="utf-8") if path else None,
        }
        self._keep()
        self._run()

    def resume(self) -> None:
        """Continue the trial that an earlier attempt has not ended, if there is one."""
        trial = self._state["trial"]
        if trial is None:
            return
        os.environ.update(trial["variables"])
        if trial["parameters"] is not None:
            path = Path(os.environ["WANDB_SWEEP_PARAM_PATH"])
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(trial["parameters"], encoding="utf-8")
        say_aside(f"hpcrun: trial {os.environ['WANDB_RUN_ID']} continues as the same W&B run")
        self._run()

    def _run(self) -> None:
        """Run the program; raises SystemExit with the code 75 if a signal has interrupted the trial."""
        code = subprocess.run(self._command, env={**os.environ, "WANDB_RESUME": "allow"}).returncode
        if code == UNFINISHED or STOP.reason:
            # A thread of W&B's agent runs this: an exception in it would not end the program.
            sys.stdout.flush()
            os._exit(UNFINISHED)
        self._state = {"finished": self.finished + 1, "trial": None}
        self._keep()
        if code:
            say_aside(f"hpcrun: the trial ended with exit code {code}; the agent continues")

    def _keep(self) -> None:
        write_json(self._record, self._state)


def main(arguments: Sequence[str] | None = None, agent: Callable[..., Any] | None = None) -> None:
    """Run an agent of a W&B sweep in a job of hpcrun.

    Args:
        arguments: of the command line.
        agent: ``wandb.agent``.

    Raises:
        UserError: outside of a job of hpcrun, or on several ranks.
    """
    parser = argparse.ArgumentParser("python -m hpcrun.integrations.wandb", description=__doc__)
    parser.add_argument("sweep", help="ENTITY/PROJECT/SWEEP, as for `wandb agent`")
    parser.add_argument(
        "--count", type=int, help="number of trials (default: until the sweep ends)"
    )
    parser.add_argument("command", nargs="+", help="the training program, after --")
    options = parser.parse_args(arguments)
    run = os.environ.get("HPCRUN_RUN")
    if run is None:
        raise UserError(
            "hpcrun.integrations.wandb: start the agent with `hpcrun submit -- python -m …`"
        )
    if os.environ.get("WORLD_SIZE", "1") != "1":
        raise UserError(
            "hpcrun.integrations.wandb: each rank would be an agent with its own trial; submit with "
            "--nodes 1 --gpus 1, and submit a run for each agent"
        )
    STOP.install()
    trials = Trials(Path(run), options.command)
    trials.resume()
    left = None if options.count is None else options.count - trials.finished
    if left is not None and left <= 0:
        return
    if agent is None:
        import wandb

        agent = wandb.agent
    agent(options.sweep, function=trials.begin, count=left)


if __name__ == "__main__":
    try:
        main()
    except UserError as error:
        say_aside(str(error))
        sys.exit(2)
