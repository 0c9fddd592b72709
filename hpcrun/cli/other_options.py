"""The place of an option that `hpcrun submit` does not have, but sbatch, torchrun or a script has."""

from typing import get_args

from hpcrun.config import Config, submit_options
from hpcrun.config.slurm_options import NAMES, parse_options

# Options of sbatch, srun, torchrun and accelerate with another name here.
_GPUS = "--gpus N (per node; one rank each)"
_HERE = {
    **dict.fromkeys(("gpus-per-node", "gres", "gpus-per-task", "ntasks-per-node"), _GPUS),
    **dict.fromkeys(("ntasks", "tasks-per-node", "ntasks-per-gpu"), _GPUS),
    **dict.fromkeys(("nproc-per-node", "num-processes", "num-gpus", "ngpus", "n-gpus"), _GPUS),
    **dict.fromkeys(("nnodes", "num-nodes", "num-machines"), "--nodes N"),
    **{
        "job-name": "--name NAME",
        "run-name": "--name NAME",
        "mem-per-cpu": "--mem SIZE (per node)",
    },
    **{"chdir": "cd FOLDER, then hpcrun submit", "array": "--sweep KEY=VALUES"},
    "wrap": "the command after `--`",
    "dependency": "'job.sbatch_args=[--dependency=VALUE]'",
    **dict.fromkeys(
        ("output", "error", "open-mode"), "`hpcrun logs RUN`, since each run keeps its logs"
    ),
    "requeue": "none, since hpcrun requeues its jobs",
    "signal": "job.signal_lead=SECONDS and job.warn_signal=NAME",
    "no-requeue": "restarts.crash=0 and the other keys of restarts",
}
_SECTIONS = ("train", "optim", "data", "checkpoint", "amp", "")
_VALUES = ("seed", "task")
_OTHER_KEYS = {
    "num_workers": "data.workers",
    "learning_rate": "train.lr",
    "max_steps": "train.steps",
}


def elsewhere(option: str) -> str:
    """Return what to write in place of ``option`` of the command line; empty if it is unknown."""
    name = option.lstrip("-").replace("_", "-")
    short = not option.startswith("--")
    if short:
        try:
            (first, *_) = parse_options("sbatch", [option])
        except ValueError:
            return ""
        name = first.name
    own = {key.replace("_", "-") for key in (*submit_options(), *submit_options(Config))}
    if name in _HERE:
        return _HERE[name]
    if name in own:
        return f"--{name}"
    if name in NAMES["sbatch"] and not short:
        return f"'job.sbatch_args=[--{name}=VALUE]', an option of sbatch"
    if key := _key(name.replace("-", "_")):
        return f"{key}=VALUE without dashes; options of a script come after `--` and the script"
    return ""


def _key(name: str) -> str:
    """Return the key of the config whose last part is ``name``; empty if there is none."""
    if name in _OTHER_KEYS:
        return _OTHER_KEYS[name]
    for section in _SECTIONS:
        fields = Config.model_fields
        if section:
            model = fields[section].annotation
            known = [one for one in (model, *get_args(model)) if hasattr(one, "model_fields")]
            fields = known[0].model_fields if known else {}
        # A section has no value of its own.
        if name in fields and (section or name in _VALUES):
            return f"{section}.{name}" if section else name
    return ""
