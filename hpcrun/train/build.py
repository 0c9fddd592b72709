"""Build the trainer of a config and a task, with the wrapped model."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpcrun.config import Config
from hpcrun.devices import vendor
from hpcrun.devices.vendor import CompileMode
from hpcrun.errors import UserError, error_on_all_ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.data.batching import accumulation_of
from hpcrun.train.determinism import fix_compiler
from hpcrun.train.model.deferred import Deferred, fill, give_memory
from hpcrun.train.model.prepare import Preparation
from hpcrun.train.optimizer import build_schedule, optimizer_of
from hpcrun.train.parallel.choose import Parallel
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import Task


def build_trainer(
    config: Config,
    task: Task,
    model: nn.Module,
    distributed: DistributedConfig,
    parallel: Parallel,
    deferred: Deferred | None = None,
    *,
    loads: bool = False,
    advance: Callable[[], None] = lambda: None,
) -> DistributedAMPTrainer:
    """Build this rank's trainer with its optimizer. Collective.

    Raises:
        UserError: the model or the task's optimizer does not fit the config.
    """
    wanted = config.train
    trainer = DistributedAMPTrainer(
        model,
        # The unwrapped module: DDP's wrapper lacks the attributes of the task's model.
        lambda _: optimizer_of(task, trainer.module, config),
        distributed=distributed,
        amp=config.amp,
        clip_norm=config.train.clip_norm,
        scheduler=lambda optimizer: build_schedule(optimizer, config),
        ema=wanted.ema,
        parallel=parallel,
        comm_hook=wanted.comm_hook,
        powersgd_rank=wanted.powersgd_rank,
        powersgd_start=wanted.powersgd_start,
        fsdp=config.fsdp,
        preparation=Preparation(
            checkpointing=wanted.activation_checkpointing,
            compile=compile_mode(config, distributed, parallel),
        ),
    )
    trainer.names_ended_ranks = False
    try:
        if wanted.compile:
            fix_compiler(wanted.deterministic, wanted.compile_mode)
        trainer.wrap_model()
        if deferred is not None:
            cpu = torch.device("cpu")
            give_memory(trainer.module, cpu if config.fsdp.cpu_offload else trainer.device)
            if loads:
                deferred.weights.clear()
            elif deferred.drawn:
                drawing: Any = trainer.module
                drawing.draw_weights()
                advance()
            else:
                fill(
                    deferred, device=trainer.device, ranks=trainer.control_ranks(), advance=advance
                )
        _ = trainer.optimizer
    except UserError as error:
        # The model is the same on every rank, so every rank has this error.
        raise error_on_all_ranks(str(error), distributed.rank) from error
    return trainer


def compile_mode(
    config: Config, distributed: DistributedConfig, parallel: Parallel
) -> CompileMode | None:
    """Return the mode of torch.compile, or None; without CUDA graphs if a step has several micro-batches.

    A graph's memory holds the gradients of its last replay only, and the second micro-batch adds to those of
    the first (https://github.com/pytorch/pytorch/issues/169545). FSDP replaces such modes itself.
    """
    train = config.train
    if not train.compile:
        return None
    mode = train.compile_mode
    parts = accumulation_of(config, distributed.world_size)
    graphs = mode in vendor.WITHOUT_GRAPHS and bool(distributed.device_ids)
    if parts == 1 or parallel == "fsdp" or not graphs:
        return mode
    other: CompileMode = vendor.WITHOUT_GRAPHS[mode]
    if distributed.rank == 0:
        print(
            f"hpcrun: train.compile_mode={mode} captures CUDA graphs, which cannot add the gradients of "
            f"{parts} micro-batches; using compile mode {other}",
            flush=True,
        )
    return other
