"""Take a training step of one rank on fake tensors, and read the peak of its memory."""

import contextlib
import gc
import io
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_iter, tree_map_only

from hpcrun.config import Config
from hpcrun.errors import UserError, one_line
from hpcrun.estimate.compiled_blocks import compile_blocks
from hpcrun.estimate.live_storages import LiveStorages, storages
from hpcrun.estimate.result import Traced
from hpcrun.estimate.strategies import GpuRules, fake_strategies
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.build import build_trainer
from hpcrun.train.data.batches import training_steps
from hpcrun.train.data.batching import Batching, accumulation_of
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.metrics.timing import forward_flops, samples_in
from hpcrun.train.model.checks import require_model, unshardable
from hpcrun.train.model.prepare import blocks
from hpcrun.train.parallel.choose import decide, decide_reshard, decide_shard, need, with_fsdp
from hpcrun.train.parallel.network import Group, machine_named
from hpcrun.train.step.gate import StepDecision, trained_by
from hpcrun.train.step.precision import LossFunction
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.train.task import Task

_UNTRACEABLE = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
)


def trace(
    task: Task,
    config: Config,
    memory: int,
    tell: Callable[[str], None],
    *,
    gpu: str = "",
    on_gpu: bool = True,
) -> Traced:
    """Return the memory of a rank under ``config`` in a step on fake tensors.

    Args:
        memory: bytes of the rank's GPU, for ``auto`` in ``train.parallel`` and in ``fsdp``.
        gpu: name of the GPU, for ``fsdp.shard=auto``.

    Raises:
        UserError: the task, its model or its data cannot be used, the step depends on the values of its
            data, or ``fsdp.cpu_offload`` is set.
    """
    job = config.job
    # With a range, the smallest number has the largest shards, and the largest micro-batch may be another's.
    ranks = job.min_nodes * job.tasks_on_node
    if config.fsdp.cpu_offload:
        raise UserError(
            "fsdp.cpu_offload: estimate counts the GPU's memory only; set it to false for the estimate"
        )
    accumulation = accumulation_of(config, ranks)
    micro_batch = max(
        Batching(config.train.batch_size, count, accumulation_of(config, count)).micro_batch
        for count in (ranks, job.world_size)
    )
    batch = first_batch(task, config, micro_batch, tell)
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    model = _build(task, mode, tell)
    require_model(model, task)
    parallel = _parallel(config, model, memory)
    sharded = parallel == "fsdp" and ranks > 1
    if sharded:
        reshards, line = decide_reshard(config, model, memory)
        config = with_fsdp(config, reshard_after_forward=reshards)
        config = with_fsdp(config, shard=_shard(config, model, memory, gpu))
        if line:
            tell(line)
    count = sum(parameter.numel() for parameter in model.parameters())
    layers = max(1, len(blocks(model)))
    flops = task.flops_per_sample if batch is None else flops_of_sample(task, batch)
    distributed = DistributedConfig(
        world_size=ranks if sharded else 1,
        num_nodes=job.min_nodes if sharded else 1,
        num_gpus_per_node=job.gpus if sharded else 1,
        backend="gloo",
    )
    # The policy of checkpointing decides what a checkpointed block keeps, compiled or not.
    compiled = config.train.compile and config.train.activation_checkpointing == "none"
    # Compilation and unused parameters read values.
    without = {"compile": False, "find_unused_parameters": False}
    changed = config.train.model_copy(update=without)
    config = config.model_copy(update={"train": changed})
    with (
        _fake_group(config, distributed) as mesh,
        fake_strategies(config, parallel, mesh),
        mode,
        LiveStorages() as live,
        GpuRules() if on_gpu else contextlib.nullcontext(),
    ):
        live.add(_values(model))
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                trainer = build_trainer(config, task, model, distributed, parallel)
                del model
                if compiled:
                    compile_blocks(trainer.module, live, tell)
                batch = tree_map_only(Tensor, mode.from_tensor, batch)
                step = None
                if batch is not None:
                    step = MicroBatches([batch] * min(accumulation, 2))
                reduces = config.fsdp.reduce_each_micro_batch
                reduces_each = trainer._strategy.auto_reduces if reduces == "auto" else reduces
                parts = _step(trainer, step, task.loss, live, on_gpu=on_gpu)
        except _UNTRACEABLE as error:
            raise UserError(
                f"task: {config.task}: no estimate: the step depends on the values of its data "
                f"({type(error).__name__}: {' '.join(str(error).split())})"
            ) from error
    # Without a step, the peak has the gradients only.
    peak = sum(parts.values()) if step is None else live.peak
    return Traced(
        *(parallel, ranks, micro_batch, accumulation, count, peak, parts, layers, flops),
        shard=config.fsdp.shard,
        reshards=config.fsdp.reshard_after_forward is not False,
        reduces_each=reduces_each,
        unit=task.unit,
        units=task.units_per_sample,
        with_data=step is not None,
    )


def flops_of_sample(task: Task, batch: Any) -> float | None:
    """Return the FLOPs of a training step per sample of ``batch``; None if the model needs values."""
    if task.flops_per_sample is not None:
        return task.flops_per_sample
    try:
        with torch.device("meta"):
            model = task.build_model()
    except Exception:  # of any type: code of the model, which may read values
        return None
    flops, samples = forward_flops(model, task.loss, batch), samples_in(batch)
    return None if flops is None or not samples else 3 * flops / samples


def _step(
    trainer: DistributedAMPTrainer,
    micro_batches: MicroBatches | None,
    loss: LossFunction,
    live: LiveStorages,
    *,
    on_gpu: bool,
) -> dict[str, int]:
    """Take a step in the state after the first step: the optimizer state exists.

    Without ``micro_batches``, the rest of the memory is the gradients.
    """
    # There are no other ranks.
    trainer._buckets_final, trainer._compared = True, 2
    optimizer = trainer.optimizer
    trained = trained_by(optimizer)
    step = _local_step(optimizer, on_gpu=on_gpu)

    def decided(*_: Any) -> tuple[None, StepDecision]:
        step()
        return None, StepDecision(trainer.gate)

    changed: Any = trainer.gate
    for parameter in trained:
        parameter.grad = torch.zeros_like(parameter)
    changed.step = decided  # Without values, the gate cannot decide: always take the step.
    gradients = storages([parameter.grad for parameter in trained])
    step()
    live.add(tree_iter(micro_batches))
    gc.collect()
    weights = storages(_values(trainer.module))
    moments = storages(tree_iter(list(optimizer.state.values())))
    # The average refers to the weights too.
    averaged = storages(tree_iter(vars(trainer._average))) if trainer._average is not None else {}
    kept = {
        "weights": sum(weights.values()),
        "optimizer": sum(moments.values()),
        "average": sum(size for key, size in averaged.items() if key not in weights),
    }
    if micro_batches is None:
        return kept | {"rest": sum(gradients.values())}
    live.start()
    trainer.training_step(micro_batches, loss)
    return kept | {"rest": live.peak - sum(kept.values())}


def _build(task: Task, mode: FakeTensorMode, tell: Callable[[str], None]) -> nn.Module:
    """Build the model on fake tensors; if its code needs values, build it with values and drop these."""
    try:
        with mode:
            model = task.build_model()
    except Exception as error:
        tell(
            f"build_model() needs real memory ({type(error).__name__}: "
            f"{' '.join(str(error).split())[:200]}); building the whole model"
        )
        try:
            model = task.build_model()
        except Exception as real:
            raise UserError(
                f"task: {type(task).__name__}.build_model() raised {type(real).__name__}: "
                f"{' '.join(str(real).split())}"
            ) from real
    if isinstance(model, nn.Module):
        _forget_data(model, mode)
    return model


def _parallel(config: Config, model: nn.Module, memory: int) -> Any:
    chosen = config.train.parallel
    if config.job.world_size == 1:
        return "single"
    if chosen in ("single", "dp"):
        raise UserError(
            f"train.parallel: {chosen} works in one process only; with several ranks use ddp or fsdp"
        )
    if chosen != "auto":
        return chosen
    return decide(config, need(config, model), memory, unfit=unshardable(model)[0])[0]


def _shard(config: Config, model: nn.Module, memory: int, gpu: str) -> str:
    nodes, on_node = config.job.min_nodes, config.job.tasks_on_node
    if config.fsdp.shard != "auto":
        return config.fsdp.shard
    if 1 in (nodes, on_node):
        return "full"
    group = Group(nodes * on_node, on_node, machine_named(gpu))
    return decide_shard(config, model, group, memory)[0]


def first_batch(task: Task, config: Config, size: int, tell: Callable[[str], None]) -> Any:
    """Return the first micro-batch of ``size`` samples; None if there are no data.

    Args:
        task: with ``stand_in_dataset``, a task makes samples of the right shape without data.
        config: the config of the run.
        size: number of samples.
        tell: gets a line about missing data.
    """
    try:
        try:
            dataset = task.train_dataset()
        except Exception:
            # Only if the data are missing, because the preparation may take hours.
            tell("preparing the data (Task.prepare)")
            task.prepare()
            dataset = task.train_dataset()
        return _first_of(dataset, task, config, size)
    except (OSError, UserError) as error:
        make: Callable[[int], Any] | None = getattr(task, "stand_in_dataset", None)
        use = "without activations" if make is None else "with samples of zeros"
        tell(f"no data ({one_line(error)}): the estimate is {use}")
        return None if make is None else _first_of(make(size), task, config, size)


def _first_of(dataset: Any, task: Task, config: Config, size: int) -> Any:
    steps = training_steps(
        dataset,
        range(1),
        rank=0,
        world_size=1,
        batch_size=size,
        accumulation=1,
        seed=config.seed,
        workers=0,
        pin_memory=False,
        collate=task.collate,
    )
    try:
        (batch,) = next(steps)
    finally:
        steps.close()
    return batch


@contextlib.contextmanager
def _fake_group(config: Config, distributed: DistributedConfig) -> Iterator[DeviceMesh | None]:
    """Make a process group with fake other ranks, and the mesh of FSDP in it."""
    if distributed.world_size == 1:
        yield None
        return
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=distributed.world_size)
    try:
        ranks: Any = list(range(distributed.world_size))
        names: tuple[str, ...] = ("shard",)
        if config.fsdp.shard == "hybrid":
            width = distributed.num_gpus_per_node
            ranks = [ranks[start : start + width] for start in ranks[::width]]
            names = ("copies", "shard")
        yield DeviceMesh("cpu", ranks, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def _local_step(optimizer: Optimizer, *, on_gpu: bool) -> Callable[[], None]:
    """Give ``optimizer`` this rank's shards as plain parameters; return its step with the gradients.

    Torch's rules for lists of sharded tensors would take minutes for hundreds of tensors, and allocate
    nothing.
    """
    pairs: list[tuple[Any, nn.Parameter]] = []
    for group in optimizer.param_groups:
        shards = [p._local_tensor if isinstance(p, DTensor) else p for p in group["params"]]
        local = [
            nn.Parameter(one.detach()) if isinstance(p, DTensor) else p
            for one, p in zip(shards, group["params"], strict=True)
        ]
        pairs += zip(group["params"], local, strict=True)
        group["params"] = local
        # On a GPU torch takes this implementation by default, whose intermediate results are large.
        if on_gpu and group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True

    def step() -> None:
        for given, local in pairs:
            gradient = given.grad
            local.grad = gradient._local_tensor if isinstance(gradient, DTensor) else gradient
        optimizer.step()
        for given, local in pairs:
            given.grad = local.grad = None

    return step


def _values(model: nn.Module) -> Iterator[Tensor]:
    yield from model.parameters()
    yield from model.buffers()


def _forget_data(model: nn.Module, mode: FakeTensorMode) -> None:
    """Replace the real tensors of ``model`` by fake tensors; shared tensors stay shared."""
    fake: dict[int, Any] = {}

    def of(value: Tensor) -> Any:
        if id(value) not in fake:
            made: Tensor = mode.from_tensor(value.detach())
            if isinstance(value, nn.Parameter):
                made = nn.Parameter(made, requires_grad=value.requires_grad)
            fake[id(value)] = made
        return fake[id(value)]

    for part in model.modules():
        for kept in (part._parameters, part._buffers):
            for name, value in kept.items():
                if value is not None and not isinstance(value, FakeTensor | DTensor):
                    kept[name] = of(value)
