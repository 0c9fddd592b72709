"""Make the optimizer and its learning-rate schedule from the config."""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from hpcrun.checkpoint.state.tree import named_parameters
from hpcrun.config import Config, decay_begins
from hpcrun.errors import UserError
from hpcrun.train.determinism import seed_for_optimizer
from hpcrun.train.learning_rate import lr_factor
from hpcrun.train.step.arguments import require_plain_step
from hpcrun.train.task import Task


class JointOptimizer(Optimizer):
    """The groups and the state of several optimizers, which step one after the other.

    The optimizers keep their state in one mapping and their options in the same groups as this object. So
    the schedule, clipping, the loss scale and checkpoints see one optimizer with more groups. A checkpoint
    of it loads into the same optimizers only, since their groups differ.
    """

    def __init__(self, optimizers: Sequence[Optimizer]) -> None:
        """``optimizers``: of different parameters; none may be used elsewhere afterwards.

        Raises:
            ValueError: two optimizers have the same parameter.
        """
        self.optimizers = list(optimizers)
        self._complete = False
        super().__init__([group for each in self.optimizers for group in each.param_groups], {})
        self._complete = True
        state: defaultdict[Any, Any] = defaultdict(dict)
        for each in self.optimizers:
            state.update(each.state)
        self.state = state
        self._connect()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Take a step of each optimizer; a closure is not supported."""
        for each in self.optimizers:
            each.step()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raise ValueError: add the group to one of the optimizers, before they are joined."""
        if self._complete:
            raise ValueError("add a group to one of the optimizers, before they are joined")
        super().add_param_group(param_group)

    def __setstate__(self, state: dict[str, Any]) -> None:
        # torch calls this method in load_state_dict(), with new groups and a new state.
        super().__setstate__(state)
        self._connect()

    def _connect(self) -> None:
        """Give each optimizer its groups and the common state."""
        first = 0
        for each in self.optimizers:
            last = first + len(each.param_groups)
            each.__setstate__({"state": self.state, "param_groups": self.param_groups[first:last]})
            first = last


def optimizer_of(task: Task, model: nn.Module, config: Config) -> Optimizer:
    """Make the task's own optimizer, or the one in ``optim``. Seeds the generators before.

    Raises:
        UserError: the task's result is not an optimizer, does not hold the trained parameters, or has no
            learning rate.
    """
    seed_for_optimizer(config.seed)
    made = task.build_optimizer(model)
    if made is None:
        return build_optimizer(model, config)
    where = f"task: {type(task).__name__}.build_optimizer()"
    own = _joined(made, where)
    held = {id(parameter) for group in own.param_groups for parameter in group["params"]}
    for name, parameter in named_parameters(model):
        if parameter.requires_grad and id(parameter) not in held:
            raise UserError(
                f"{where} misses {name}, which requires a gradient; put it into a group, or set its "
                "requires_grad=False in build_model"
            )
    if held - {id(parameter) for parameter in model.parameters()}:
        raise UserError(
            f"{where} has parameters that are not in the model; use those of its argument, since sharding "
            "replaces the parameters that build_model made"
        )
    for group in own.param_groups:
        rate = group.get("lr")
        if not isinstance(rate, int | float | torch.Tensor):
            raise UserError(
                f"{where} gave the learning rate {rate!r}; give a number such as self.config.train.lr, which "
                "the schedule in optim multiplies"
            )
        if (factor := lr_factor(config)) != 1.0:
            group["lr"] = rate * factor  # Not in place: groups may share a tensor.
    return own


def _joined(made: Any, where: str) -> Optimizer:
    """Return a task's optimizer, or its list, tuple or dict of optimizers as one; raises UserError."""
    several: list[Any] = [made]
    if made and isinstance(made, list | tuple | dict):
        several = list(made.values() if isinstance(made, dict) else made)
    for one in several:
        if not isinstance(one, Optimizer):
            raise UserError(
                f"{where} returned a {type(one).__name__}; return a torch.optim.Optimizer, or a list or dict "
                "of them, or None for the one in optim"
            )
        try:
            require_plain_step(one)
        except ValueError as error:
            raise UserError(f"{where}: {error}") from error
    if len(several) == 1:
        alone: Optimizer = several[0]
        return alone
    try:
        return JointOptimizer(several)
    except ValueError as error:
        raise UserError(
            f"{where}: its optimizers cannot be joined: {error}; give each parameter to one of them, and "
            "names of parameters to all of them or to none"
        ) from error


def build_optimizer(model: nn.Module, config: Config) -> Optimizer:
    """Make the optimizer in ``config.optim``, at the peak learning rate, fused if torch supports it.

    Vectors (biases, norms) get no weight decay, as for GPT-3 (Brown et al. 2020, app. B).
    """
    wanted = config.optim
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = _groups(trained, wanted.weight_decay)
    kind: type[Optimizer]
    options: dict[str, Any] = {"lr": config.train.lr * lr_factor(config)}
    if wanted.name == "sgd":
        kind, options = SGD, options | {"momentum": wanted.momentum}
    else:
        kind = AdamW if wanted.name == "adamw" else Adam
        options |= {"betas": wanted.betas, "eps": wanted.eps}
    if wanted.fused and has_fused(kind, trained):
        options["fused"] = True
    optimizer = kind(groups, **options)
    if kind is SGD and "fused" in options and wanted.momentum:
        optimizer.register_step_pre_hook(_fill_momentum)
    return optimizer


def _groups(parameters: list[nn.Parameter], decay: float) -> list[dict[str, Any]]:
    """Return the parameter groups: vectors get no weight decay."""
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _fill_momentum(optimizer: Optimizer, *_: Any) -> None:
    """Give a parameter with a later first gradient zero momentum, which torch's fused SGD does not do."""
    for group in optimizer.param_groups:
        given = [parameter for parameter in group["params"] if parameter.grad is not None]
        held = [optimizer.state.get(one, {}).get("momentum_buffer") for one in given]
        new = [one for one, momentum in zip(given, held, strict=True) if momentum is None]
        # In the first step of a group torch makes the momentum itself.
        if len(new) < len(given):
            for parameter in new:
                optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)


def has_fused(kind: type[Optimizer], parameters: list[nn.Parameter]) -> bool:
    """Return True if this torch has a fused kernel of the optimizer ``kind`` for all ``parameters``.

    Support for devices, precisions and sharded tensors differs between versions of torch, so this takes a
    trial step with zeros, shaped like the smallest parameter of each sort. An error of another kind, such as
    a lack of memory, is raised: another kernel after a resume would change bits.
    """
    smallest: dict[tuple[Any, ...], nn.Parameter] = {}
    for parameter in sorted(parameters, key=nn.Parameter.numel):
        smallest.setdefault((type(parameter), parameter.device, parameter.dtype), parameter)
    for parameter in smallest.values():
        trial = nn.Parameter(torch.zeros_like(parameter))
        trial.grad = torch.zeros_like(trial)
        make: Any = kind
        try:
            make([trial], lr=1e-3, fused=True).step()
        except NotImplementedError:
            return False
        except RuntimeError as error:
            # "`fused=True` requires ...", "aten._fused_adamw_.default: got mixed ..."
            if "fused" not in str(error):
                raise
            return False
    return True


def build_schedule(optimizer: Optimizer, config: Config) -> LambdaLR:
    """Make the schedule: the learning rate as a factor of its peak at each optimizer step."""
    return LambdaLR(optimizer, learning_rate_factor(config))


def learning_rate_factor(config: Config) -> Callable[[int], float]:
    """Return the factor as a function of the step.

    Linear warm-up from 1/warmup_steps to 1, then the schedule down to ``final_lr_fraction`` at
    ``train.steps``. cosine: Loshchilov, Hutter 2017, without restarts. wsd: warm-up, stable, decay, Hu et
    al. 2024, linear over the last ``decay_steps``.
    """
    warmup, steps = config.optim.warmup_steps, config.train.steps
    floor, schedule = config.optim.final_lr_fraction, config.optim.schedule
    first = decay_begins(config)

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        if step < first:
            return 1.0
        progress = min(1.0, (step - first) / max(1, steps - first))
        if schedule == "cosine":
            return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))
        return floor + (1 - floor) * (1 - progress)

    return factor
