"""hpcrun: PyTorch training on Slurm; the final weights are the same as without interruptions.

The public interface: jobs (``submit``, ``open``), and parts for a task and for your own training loop. Each
name is imported at its first use, so ``import hpcrun`` imports neither torch nor any other slow package.
"""

import sys

# Every program of hpcrun begins here, in syntax that an old Python understands.
if sys.version_info < (3, 10):  # noqa: UP036
    found = "%d.%d (%s)" % (sys.version_info[0], sys.version_info[1], sys.executable)  # noqa: UP031
    raise ImportError("hpcrun needs Python 3.10 or newer, and this is " + found)

import os

# `python -m hpcrun` puts the working folder first, whose queue.py or random.py would replace Python's own.
# While -m looks for a module of this package, its name stands for the program.
if sys.argv[:1] == ["-m"] and not getattr(sys.flags, "safe_path", False):
    _found = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    if sys.path[0] != _found:
        del sys.path[0]

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcrun.api.open_run import open_run as open
    from hpcrun.api.run import Run, wait_any
    from hpcrun.api.submission.submitting import submit
    from hpcrun.api.sweeps.handle import Sweep
    from hpcrun.api.sweeps.submitting import map_array
    from hpcrun.checkpoint.checkpointer import Checkpointer
    from hpcrun.checkpoint.state.tree import named_parameters
    from hpcrun.config import FSDP, AMPConfig, Config, ConfigError
    from hpcrun.config.amp import create_default_amp_config
    from hpcrun.errors import UserError
    from hpcrun.ranks.collective import StopAgreement
    from hpcrun.ranks.distributed import DistributedConfig
    from hpcrun.ranks.signals import STOP
    from hpcrun.results.frames import Results, load_results
    from hpcrun.run.reports import report
    from hpcrun.storage.errors import CheckpointError, CheckpointWarning
    from hpcrun.storage.retention import Retention
    from hpcrun.train.data.batches import training_steps
    from hpcrun.train.data.contiguous import DistributedSampler
    from hpcrun.train.data.micro_batches import MicroBatches
    from hpcrun.train.determinism import choose_kernels
    from hpcrun.train.learning_rate import scaled_lr
    from hpcrun.train.model.prepare import Preparation
    from hpcrun.train.own_loop.resumable import resumable
    from hpcrun.train.parallel.process_group import (
        cleanup_distributed,
        get_rank,
        get_world_size,
        is_main_process,
        setup_distributed,
    )
    from hpcrun.train.parallel.wrap import wrap_model_ddp, wrap_model_fsdp
    from hpcrun.train.step.trainer import AMPTrainer, DistributedAMPTrainer
    from hpcrun.train.task import Task

__version__ = "0.1.0"

__all__ = [
    "FSDP",
    "STOP",
    "AMPConfig",
    "AMPTrainer",
    "CheckpointError",
    "CheckpointWarning",
    "Checkpointer",
    "Config",
    "ConfigError",
    "DistributedAMPTrainer",
    "DistributedConfig",
    "DistributedSampler",
    "MicroBatches",
    "Preparation",
    "Results",
    "Retention",
    "Run",
    "StopAgreement",
    "Sweep",
    "Task",
    "UserError",
    "choose_kernels",
    "cleanup_distributed",
    "create_default_amp_config",
    "get_rank",
    "get_world_size",
    "is_main_process",
    "load_results",
    "map_array",
    "named_parameters",
    "open",
    "report",
    "resumable",
    "scaled_lr",
    "setup_distributed",
    "submit",
    "training_steps",
    "wait_any",
    "wrap_model_ddp",
    "wrap_model_fsdp",
]

if not TYPE_CHECKING:
    # `from hpcrun import *` must not replace the builtin, nor names that programs have from torch. Type
    # checkers export only the names of the list.
    for _name in ("DistributedSampler", "FSDP", "open"):
        __all__.remove(_name)

_HOMES = {
    "AMPConfig": "hpcrun.config",
    "AMPTrainer": "hpcrun.train.step.trainer",
    "CheckpointError": "hpcrun.storage.errors",
    "CheckpointWarning": "hpcrun.storage.errors",
    "Checkpointer": "hpcrun.checkpoint.checkpointer",
    "Config": "hpcrun.config",
    "ConfigError": "hpcrun.config",
    "DistributedAMPTrainer": "hpcrun.train.step.trainer",
    "DistributedConfig": "hpcrun.ranks.distributed",
    "DistributedSampler": "hpcrun.train.data.contiguous",
    "FSDP": "hpcrun.config",
    "MicroBatches": "hpcrun.train.data.micro_batches",
    "Preparation": "hpcrun.train.model.prepare",
    "Results": "hpcrun.results.frames",
    "Retention": "hpcrun.storage.retention",
    "Run": "hpcrun.api.run",
    "STOP": "hpcrun.ranks.signals",
    "Sweep": "hpcrun.api.sweeps.handle",
    "StopAgreement": "hpcrun.ranks.collective",
    "Task": "hpcrun.train.task",
    "UserError": "hpcrun.errors",
    "choose_kernels": "hpcrun.train.determinism",
    "cleanup_distributed": "hpcrun.train.parallel.process_group",
    "create_default_amp_config": "hpcrun.config.amp",
    "get_rank": "hpcrun.train.parallel.process_group",
    "get_world_size": "hpcrun.train.parallel.process_group",
    "is_main_process": "hpcrun.train.parallel.process_group",
    "load_results": "hpcrun.results.frames",
    "map_array": "hpcrun.api.sweeps.submitting",
    "named_parameters": "hpcrun.checkpoint.state.tree",
    "open": "hpcrun.api.open_run:open_run",
    "report": "hpcrun.run.reports",
    "resumable": "hpcrun.train.own_loop.resumable",
    "scaled_lr": "hpcrun.train.learning_rate",
    "setup_distributed": "hpcrun.train.parallel.process_group",
    "submit": "hpcrun.api.submission.submitting",
    "training_steps": "hpcrun.train.data.batches",
    "wait_any": "hpcrun.api.run",
    "wrap_model_ddp": "hpcrun.train.parallel.wrap",
    "wrap_model_fsdp": "hpcrun.train.parallel.wrap",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home, _, inside = _HOMES[name].partition(":")
    value = getattr(import_module(home), inside or name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
