"""hpcrun: PyTorch training on Slurm that ends with the weights it would have ended with undisturbed.

The names below are what a program of one's own needs. Each is fetched at its first use, so that
importing the package imports neither torch nor anything else that is slow.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hpcrun.cluster.distributed import DistributedConfig
    from hpcrun.config import AMPConfig
    from hpcrun.run.reports import report
    from hpcrun.train.process_group import (
        cleanup_distributed,
        get_rank,
        get_world_size,
        is_main_process,
        setup_distributed,
    )
    from hpcrun.train.task import Task
    from hpcrun.train.trainer import AMPTrainer, DistributedAMPTrainer

__version__ = "0.1.0"

__all__ = [
    "AMPConfig",
    "AMPTrainer",
    "DistributedAMPTrainer",
    "DistributedConfig",
    "Task",
    "cleanup_distributed",
    "get_rank",
    "get_world_size",
    "is_main_process",
    "report",
    "setup_distributed",
]

_HOMES = {
    "AMPConfig": "hpcrun.config",
    "AMPTrainer": "hpcrun.train.trainer",
    "DistributedAMPTrainer": "hpcrun.train.trainer",
    "DistributedConfig": "hpcrun.cluster.distributed",
    "Task": "hpcrun.train.task",
    "cleanup_distributed": "hpcrun.train.process_group",
    "get_rank": "hpcrun.train.process_group",
    "get_world_size": "hpcrun.train.process_group",
    "is_main_process": "hpcrun.train.process_group",
    "report": "hpcrun.run.reports",
    "setup_distributed": "hpcrun.train.process_group",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
