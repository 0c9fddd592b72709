"""Muon for the matrices of the layers, and AdamW for all other weights, also with FSDP.

A task uses it as its own optimizer:

    def build_optimizer(self, model):
        return muon(model, self.config)

Muon (K. Jordan et al. 2024) orthogonalizes the update of a matrix. Of a sharded matrix each rank has some
rows, so the class here gathers as many matrices as there are shards. Each rank computes one of them, and
sends the result to the others. Updates have the size of AdamW's (J. Liu et al. 2025, arXiv:2502.16982), so
both use ``train.lr`` and ``optim.weight_decay``. It needs torch 2.9 or newer, and no ``fsdp.cpu_offload``.
Copy the file to change it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.optim import AdamW, Optimizer
from torch.optim._muon import Muon, _adjust_lr, _zeropower_via_newtonschulz

from hpcrun import Config

MOMENTUM = 0.95
LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def muon(model: nn.Module, config: Config) -> list[Optimizer]:
    """Return Muon for ``hidden_matrices``, and AdamW for the rest; vectors get no weight decay."""
    wanted, rate = config.optim, config.train.lr
    matrices = hidden_matrices(model)
    chosen = set(map(id, matrices))
    rest = [p for p in model.parameters() if p.requires_grad and id(p) not in chosen]
    groups = [
        {"params": [p for p in rest if p.dim() > 1], "weight_decay": wanted.weight_decay},
        {"params": [p for p in rest if p.dim() <= 1], "weight_decay": 0.0},
    ]
    made: list[Optimizer] = [
        ShardedMuon(
            matrices,
            lr=rate,
            weight_decay=wanted.weight_decay,
            momentum=MOMENTUM,
            adjust_lr_fn="match_rms_adamw",
        )
    ]
    if groups := [group for group in groups if group["params"]]:
        made.append(AdamW(groups, lr=rate, betas=wanted.betas, eps=wanted.eps))
    return made


def hidden_matrices(model: nn.Module) -> list[nn.Parameter]:
    """Return the trained parameters of two dimensions in the model's lists of layers, without embeddings.

    In a model without a matrix in a list, all matrices count.
    """
    embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
    matrices = {
        id(parameter): parameter
        for parameter in model.parameters()
        if parameter.dim() == 2 and parameter.requires_grad and id(parameter) not in embeddings
    }
    within = {
        id(parameter)
        for part in model.modules()
        if isinstance(part, LISTS)
        for parameter in part.parameters()
    }
    listed = [parameter for key, parameter in matrices.items() if key in within]
    return listed or list(matrices.values())


class ShardedMuon(Muon):
    """torch's Muon, with a gathered update for sharded parameters. Collective for these."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Take a step: of the sharded matrices here, of the others as torch does."""
        for group in self.param_groups:
            sharded: list[DTensor] = [
                p for p in group["params"] if isinstance(p, DTensor) and p.grad is not None
            ]
            # Matrices of one size together, so that the ranks have equal work.
            sharded.sort(key=lambda parameter: parameter.numel(), reverse=True)
            ranks = sharded[0].device_mesh.size(-1) if sharded else 1
            for first in range(0, len(sharded), ranks):
                self._step_sharded(sharded[first : first + ranks], group)
        kept = [group["params"] for group in self.param_groups]
        try:
            for group in self.param_groups:
                group["params"] = [p for p in group["params"] if not isinstance(p, DTensor)]
            return super().step(closure)  # type: ignore[no-untyped-call]
        finally:
            for group, parameters in zip(self.param_groups, kept, strict=True):
                group["params"] = parameters

    def _step_sharded(self, parameters: list[DTensor], group: dict[str, Any]) -> None:
        """Take a step of at most as many matrices as a mesh has shards: each rank computes one matrix."""
        mesh = parameters[0].device_mesh
        shards = mesh.ndim - 1  # With fsdp.shard=hybrid, the first dimension has copies.
        here, own = mesh.get_local_rank(shards), None
        for owner, parameter in enumerate(parameters):
            whole = self._update(parameter, group).full_tensor()
            if owner == here:
                own = whole
        if own is not None:
            own = _zeropower_via_newtonschulz(
                own, group["ns_coefficients"], group["ns_steps"], group["eps"]
            ).contiguous()
        for owner, parameter in enumerate(parameters):
            whole = own if own is not None and owner == here else None
            if whole is None:
                whole = torch.empty(
                    parameter.shape, dtype=torch.bfloat16, device=parameter.to_local().device
                )
            dist.broadcast(whole, group=mesh.get_group(shards), group_src=owner)
            same = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
            part = same.redistribute(mesh, parameter.placements).to_local()
            rate = _adjust_lr(group["lr"], group["adjust_lr_fn"], parameter.shape)
            local = parameter.to_local()
            local.mul_(1 - group["lr"] * group["weight_decay"])
            local.add_(part, alpha=-rate)

    def _update(self, parameter: DTensor, group: dict[str, Any]) -> Any:
        """Update the momentum of ``parameter``; return the shards of the matrix to orthogonalize."""
        gradient: Any = parameter.grad
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"]
        buffer.lerp_(gradient, 1 - group["momentum"])
        return gradient.lerp(buffer, group["momentum"]) if group["nesterov"] else buffer
