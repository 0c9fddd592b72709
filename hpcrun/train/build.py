"""The trainer that a config and its task ask for, with the model wrapped."""

from torch import nn

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.train.errors import known_to_all
from hpcrun.train.model.prepare import Preparation
from hpcrun.train.optimizer import build_schedule, optimizer_of
from hpcrun.train.parallel.choose import Parallel
from hpcrun.train.parallel.gradient_compression import compression
from hpcrun.train.step.precision import shortfall
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import Task


def build_trainer(
    config: Config,
    task: Task,
    model: nn.Module,
    distributed: DistributedConfig,
    parallel: Parallel,
) -> DistributedAMPTrainer:
    """The trainer of this rank, with its optimiser. Collective.

    Raises:
        UserError: the model or the task's optimiser is not what this training asks for.
    """
    wanted = config.train
    trainer = DistributedAMPTrainer(
        model,
        # Without DDP's wrapper, which has no attributes of the task's model.
        lambda _: optimizer_of(task, trainer.module, config),
        distributed=distributed,
        amp=config.amp,
        clip_norm=config.train.clip_norm,
        scheduler=lambda optimizer: build_schedule(optimizer, config),
        ema=wanted.ema,
        parallel=parallel,
        fsdp=config.fsdp,
        compression=compression(
            wanted.compression, rank=wanted.powersgd_rank, start=wanted.powersgd_start
        ),
        preparation=Preparation(
            checkpointing=wanted.activation_checkpointing,
            every=wanted.checkpoint_blocks,
            compile=wanted.compile_mode if wanted.compile else None,
            channels_last=wanted.channels_last,
        ),
    )
    less = shortfall(config.amp, trainer.device)
    if less is not None and trainer.is_main_process:
        print(f"hpcrun: {less}", flush=True)
    try:
        trainer.wrap_model()
        _ = trainer.optimizer
    except UserError as error:
        # What a model lacks it lacks on every rank.
        raise known_to_all(str(error), distributed.rank) from error
    return trainer
