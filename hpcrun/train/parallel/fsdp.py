"""FSDPStrategy: shard weights, gradients and optimizer state over ranks (torch's FSDP2, ``fully_shard``)."""

import contextlib
import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from hpcrun.checkpoint.state.generators import kept_generators
from hpcrun.config.training import FSDP
from hpcrun.devices import accelerator, vendor
from hpcrun.devices.vendor import CompileMode
from hpcrun.errors import NotTrainable, UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.model.checks import kept_buffers, unshardable
from hpcrun.train.model.prepare import blocks, compile_in_place, unshared
from hpcrun.train.model.units import by_size
from hpcrun.train.parallel.fsdp_check import ShardedUse
from hpcrun.train.parallel.network import BYTES, MANY_GRADIENTS
from hpcrun.train.parallel.process_group import connect
from hpcrun.train.parallel.strategies import Strategy, copy_from_rank_zero

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LARGE = 2**20
"""Weights from which a layer outside of blocks is a unit; the latency of a gather outweighs fewer."""

_PRECISIONS = re.compile(r"(BFloat16|Half).*\bsame\b|\b(same|scalar type)\b.*(BFloat16|Half)")
"""Torch's error texts for an operation on half and full precision."""

_MIXED = "got mixed torch.Tensor and DTensor"
"""Torch's error text for a shard combined with an unsharded tensor."""


class FSDPStrategy(Strategy):
    """Shard every tensor over the ranks; each block gathers its weights when it runs."""

    replaces_parameters = True
    buffers_differ = True
    collective_forward = True

    def __init__(self, distributed: DistributedConfig, options: FSDP, precision: str) -> None:
        """``precision``: an ``AMPConfig.dtype``, the default of ``options.param_dtype``."""
        if distributed.find_unused_parameters:
            raise ValueError(
                "find_unused_parameters is for ddp; under fsdp use the same parameters on all ranks"
            )
        self._distributed, self._options = distributed, options
        self._precision = options.param_dtype or precision
        self._scaled = precision == "fp16"
        self.casts = self._precision in ("bf16", "fp16")
        self._shape: nn.Module | Exception | None = None
        self._syncs = self._was_last = True
        self._reduces_each = options.reduce_each_micro_batch is True
        self._use: ShardedUse | None = None
        self._compiled = False

    def place(self, module: nn.Module, device: torch.device) -> nn.Module:
        # Not moved: the unsharded model may not fit the device. It moves block by block.
        self._device = device
        return module

    def remember(self, module: nn.Module) -> None:
        if self._distributed.rank != 0:
            return
        try:
            self._shape = without_weights(module)
        except Exception as error:
            self._shape = error  # Training needs no copy; whole() reports the error.

    def wrap(self, module: nn.Module, mode: CompileMode | None) -> nn.Module:
        """Compile and shard the units, then the rest of ``module``."""
        if mode in vendor.WITHOUT_GRAPHS and self._distributed.rank == 0:
            print(
                f"hpcrun: train.compile_mode={mode} replays graphs at fixed addresses, but fsdp gathers "
                f"weights at new ones; using compile mode {vendor.WITHOUT_GRAPHS[mode]}",
                flush=True,
            )
        unfit, remedy = unshardable(module)
        if unfit is not None:
            raise UserError(
                f"train.parallel: fsdp cannot shard the model: {unfit}; {remedy}, or use ddp"
            )
        parts, compiled = units(module, self._options)
        self.auto_reduces = self._unsharded_gradients(module) >= MANY_GRADIENTS
        if self._options.reduce_each_micro_batch == "auto":
            self._reduces_each = self.auto_reduces
        mesh = make_mesh(self._distributed, self._options, self._device)
        if dist.get_backend() == "nccl":
            connect_groups(mesh, self._device)
        options = self._sharding(mesh)
        # Without a config of a run nothing has decided for auto.
        below: dict[str, Any] = {
            "reshard_after_forward": self._options.reshard_after_forward is not False
        }
        # The backward pass starts with the root's weights, so torch keeps them until then.
        at_root = {} if self._options.reshard_after_forward else below
        norms = self._running_norms(module)
        in_full = {"mp_policy": MixedPrecisionPolicy(cast_forward_inputs=False)}
        for part in [*(norm for norm in norms if norm not in parts), *parts]:
            if mode is not None and part in compiled:
                compile_in_place(part, mode=vendor.WITHOUT_GRAPHS.get(mode, mode))
            self._from_rank_zero(part)
            fully_shard(part, **{**options, **below, **(in_full if part in norms else {})})
        if mode is not None and not compiled:
            compile_in_place(module, mode=vendor.WITHOUT_GRAPHS.get(mode, mode))
        self._from_rank_zero(module)
        if self.casts:
            # As autocast, which computes a loss in fp32.
            policy = replace(options["mp_policy"], output_dtype=torch.float32)
            options = {**options, "mp_policy": policy}
        fully_shard(module, **options, **at_root)
        self._compiled = mode is not None
        self._use = ShardedUse(module)
        return module

    def compare(
        self, ranks: Ranks, model: nn.Module, forwards: Sequence[Callable[[], Tensor]]
    ) -> None:
        if self._use is None:
            return
        self._use.compare(ranks)
        if not self._compiled:
            return
        # Separate passes, since a removal of hooks from compiled blocks would compile them again.
        with torch.compiler.set_stance("force_eager"), kept_buffers(model), kept_generators():
            for number, forward in enumerate(forwards, 1):
                with self.micro_batch(model, last=number == len(forwards)):
                    self.before_backward(forward())
        self.after_evaluation(model)

    def before_backward(self, value: Tensor) -> None:
        if self._use is not None:
            self._use.before_backward(value)

    def micro_batch(
        self, model: nn.Module, *, last: bool
    ) -> contextlib.AbstractContextManager[Any]:
        reduces = last or self._reduces_each
        if isinstance(model, FSDPModule):
            if self._syncs != reduces:
                model.set_requires_gradient_sync(reduces)
            if self._was_last != last and not self._options.reshard_after_forward:
                # reshard_after_forward=false spends memory on gathered weights: keep them between
                # micro-batches too.
                model.set_reshard_after_backward(last)
            self._syncs, self._was_last = reduces, last
        if self._use is not None:
            self._use.begin(last=last, reduces=reduces)
        return self._passes()

    def clip(self, parameters: Iterable[nn.Parameter], limit: float) -> Tensor:
        clipped = list(parameters)
        gradients = [p.grad for p in clipped if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        nn.utils.clip_grads_with_norm_(clipped, limit, norm)
        return norm

    def after_evaluation(self, model: nn.Module) -> None:
        # Without a backward pass the root's weights stay gathered; the next pass would use stale weights.
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.reshard()

    def whole(self, module: nn.Module, device: torch.device) -> nn.Module | None:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        values: dict[str, Any] = dict(get_model_state_dict(module, options=options))
        if self._shape is None:
            return None
        if isinstance(self._shape, Exception):
            kind, text = type(self._shape).__name__, " ".join(str(self._shape).split())
            raise RuntimeError(
                f"cannot make an unsharded copy of {type(module).__name__}: {kind}: {text}"
            ) from self._shape
        plain = with_weights(self._shape, values)
        size = sum(value.numel() * value.element_size() for value in values.values())
        if accelerator.is_accelerator(device) and 2 * size < accelerator.memory(device)[0]:
            plain.to(device)
        return plain

    def _sharding(self, mesh: DeviceMesh) -> dict[str, Any]:
        offload = self._options.cpu_offload and mesh.device_type != "cpu"
        if offload and self._scaled:
            raise UserError(
                "fsdp.cpu_offload: torch's loss scaler for fp16 reads a factor for offloaded gradients "
                "before its copy to the CPU has ended; use bf16, or fsdp.cpu_offload=false"
            )
        low = {None, "fp32", "tf32"}
        reduce = self._options.reduce_dtype or self._precision
        return {
            "mesh": mesh,
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=None if self._precision in low else _DTYPES[self._precision],
                reduce_dtype=_DTYPES.get(reduce, torch.float32),
                # Without weights in half precision, autocast decides the precision of each operation.
                cast_forward_inputs=self.casts,
            ),
            "offload_policy": CPUOffloadPolicy() if offload else OffloadPolicy(),
        }

    @contextlib.contextmanager
    def _passes(self) -> Iterator[None]:
        """Wrap the passes of a micro-batch.

        Raises:
            NotTrainable: a part reads another part's shard, or combines half with full precision.
        """
        try:
            yield
        except RuntimeError as error:
            text = " ".join(str(error).split())
            if _MIXED in text:
                raise NotTrainable(
                    "train.parallel: fsdp gathers the weights of a part for the forward pass of this part, "
                    f"but the model reads them in another part too ({text}); set fsdp.wrap=blocks, or use ddp"
                ) from error
            if self.casts and _PRECISIONS.search(text):
                raise NotTrainable(
                    f"train.parallel: fsdp computes in {self._precision}, but the model combines "
                    f"{self._precision} and fp32 ({text}); convert the fp32 tensor to the weight's type, or "
                    "set fsdp.param_dtype=fp32 for autocast"
                ) from error
            raise

    def _unsharded_gradients(self, module: nn.Module) -> int:
        """Return the bytes of gradients on each rank if only the last micro-batch reduces them."""
        trained = sum(p.numel() for p in module.parameters() if p.requires_grad)
        return trained * BYTES[self._options.reduce_dtype or self._precision]

    def _running_norms(self, module: nn.Module) -> list[nn.Module]:
        """Return the norms with running statistics in fp32; their weights must stay in fp32 too."""
        if self._precision not in ("bf16", "fp16"):
            return []
        found: list[nn.Module] = [
            part
            for part in module.modules()
            if isinstance(part, _NormBase) and part.track_running_stats and part.affine
        ]
        return [norm for norm in unshared(module, found) if norm is not module]

    def _from_rank_zero(self, part: nn.Module) -> None:
        """Broadcast rank 0's values of tensors that are not sharded yet, as DDP does."""
        for value in [*part.parameters(), *part.buffers()]:
            if not isinstance(value, DTensor) and not value.is_meta:
                value.data = value.data.to(self._device)
                copy_from_rank_zero(value.data)


def units(module: nn.Module, options: FSDP) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the submodules of ``module`` to shard as units, and those of them to compile: the blocks.

    With ``wrap=size`` the units without units inside are compiled. Submodules with tied weights belong to the
    root.
    """
    if options.wrap == "size":
        found = by_size(module, options.min_parameters)
        inner = [
            one
            for one in found
            if not any(part in found for part in one.modules() if part is not one)
        ]
        return found, inner
    found = unshared(module, blocks(module))
    outside = large_layers(module, found) if options.wrap == "auto" else []
    return [*found, *outside], found


def large_layers(root: nn.Module, parts: list[nn.Module]) -> list[nn.Module]:
    """Return the large layers outside of the blocks ``parts``: embeddings and output layers.

    The root gathers its weights before the forward pass, when nothing overlaps, and keeps them to the end of
    the backward pass. A layer with at least `LARGE` weights, none of them tied, is gathered by itself. An
    embedding counts only if an output layer of the same shape exists: otherwise the model may use the
    embedding's matrix for its output (``F.linear(x, embedding.weight)``).
    """
    inside = {id(inner) for part in parts for inner in part.modules()}
    found = unshared(
        root,
        [
            part
            for part in root.modules()
            if isinstance(part, (nn.Embedding, nn.Linear))
            # MultiheadAttention uses the weights of this layer without calling the layer.
            and not isinstance(part, NonDynamicallyQuantizableLinear)
            and id(part) not in inside
            and part is not root
            and part.weight.numel() >= LARGE
        ],
    )
    outputs = {part.weight.shape for part in found if isinstance(part, nn.Linear)}
    return [
        part
        for part in found
        if parts and (isinstance(part, nn.Linear) or part.weight.shape in outputs)
    ]


def layout(places: list[tuple[int, int]]) -> list[list[int]]:
    """Arrange the ranks in rows, one row per node, for hybrid sharding.

    Raises:
        UserError: the nodes have different numbers of ranks.
    """
    counts = Counter(node for node, _ in places)
    if len(set(counts.values())) > 1:
        numbers = ", ".join(str(count) for _, count in sorted(counts.items()))
        raise UserError(
            f"fsdp.shard: hybrid needs the same number of ranks on each node, but the nodes have {numbers}; "
            "set fsdp.shard=full, or request equal nodes"
        )
    order = sorted(range(len(places)), key=lambda rank: places[rank])
    width = max(counts.values())
    return [order[start : start + width] for start in range(0, len(order), width)]


def make_mesh(distributed: DistributedConfig, options: FSDP, device: torch.device) -> DeviceMesh:
    """Make the mesh of the ranks: shards, or with ``hybrid`` copies and shards. Collective."""
    ranks: Any = list(range(distributed.world_size))
    names: tuple[str, ...] = ("shard",)
    if options.shard == "hybrid":
        places: list[Any] = [None] * distributed.world_size
        dist.all_gather_object(places, (distributed.node_rank, distributed.local_rank))
        ranks, names = layout(places), ("copies", "shard")
    if not (options.cpu_offload and accelerator.is_accelerator(device)):
        return DeviceMesh(device.type, ranks, mesh_dim_names=names)
    # The norm of offloaded gradients is reduced on the CPU, which NCCL does not support.
    return mesh_over(torch.tensor(ranks), names, device.type, f"cpu:gloo,{device.type}:nccl")


def mesh_over(ranks: Tensor, names: tuple[str, ...], device: str, backend: str) -> DeviceMesh:
    """Make a mesh of ``ranks``, with a group of ``backend`` for each row and each column. Collective."""
    groups = []
    for dimension in range(ranks.dim()):
        for members in ranks.movedim(dimension, -1).reshape(-1, ranks.shape[dimension]).tolist():
            group = dist.new_group(members, backend=backend)
            if dist.get_rank() in members:
                groups.append(group)
    if ranks.dim() == 1:
        return DeviceMesh.from_group(groups[0], device, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, device, mesh=ranks, mesh_dim_names=names)


def connect_groups(mesh: DeviceMesh, device: torch.device) -> None:
    """Connect the groups of ``mesh``, as :func:`process_group.connect` connects all ranks. Collective."""
    for group in mesh.get_all_groups():
        connect(device, group)


def without_weights(module: nn.Module) -> nn.Module:
    """Copy ``module`` with parameters on the meta device; call it before sharding or wrapping."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(
            torch.empty_like(parameter, device="meta"), requires_grad=parameter.requires_grad
        )
        for parameter in module.parameters()
    }
    return copy.deepcopy(module, memo)


def with_weights(shape: nn.Module, values: dict[str, Tensor]) -> nn.Module:
    """Copy the model of ``without_weights`` with the tensors of ``values``, a full state dict."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(values[name], requires_grad=parameter.requires_grad)
        for name, parameter in shape.named_parameters()
    }
    plain = copy.deepcopy(shape, memo)
    plain.load_state_dict(
        {name: values[name] for name, _ in plain.named_buffers() if name in values}, strict=False
    )
    return plain
