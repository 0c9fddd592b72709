"""Decide whether the task's model is built without memory for its weights, and build it either way."""

import contextlib
import hashlib
from collections.abc import Callable
from typing import Any

from torch import nn

from hpcrun.checkpoint.state import capture
from hpcrun.config import Config
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.train.deferred.build import Deferred, build_deferred
from hpcrun.train.deferred.fill import LaterDraws, described
from hpcrun.train.deferred.tape import Unreplayable
from hpcrun.train.determinism import seed_alike
from hpcrun.train.model.initial_weights import (
    LoadedAtUse,
    initial_state,
    load_initial_weights,
)
from hpcrun.train.model.prepare import synchronized
from hpcrun.train.parallel.choose import only_ddp
from hpcrun.train.task import Task


def build_model(
    task: Task, config: Config, distributed: DistributedConfig, *, resumes: bool = False
) -> tuple[Any, Deferred | None]:
    """Return the result of ``task.build_model()``, and the recording of a model without weights.

    ``resumes``: a checkpoint follows, so that a file of initial weights is not read (see `covers`). The
    datasets must then be made within `for_datasets`.

    Raises:
        UserError: ``fsdp.deferred_init`` is true, and the build cannot be recorded.
    """
    # The same seed on every rank, so that all ranks start with the same weights.
    seed_alike(config.seed)
    if not _wanted(config, distributed):
        return _build(task, config, distributed, resumes), None
    generators = capture.capture_rank()
    try:
        deferred = build_deferred(lambda: _build(task, config, distributed, resumes))
    except Unreplayable as error:
        where = f"fsdp.deferred_init: {type(task).__name__}.build_model()"
        if config.fsdp.deferred_init is True:
            raise UserError(
                f"{where} cannot be deferred: {error}; change it, or set fsdp.deferred_init=false"
            ) from None
        if distributed.rank == 0:
            print(f"hpcrun: {where} runs on every rank in full: {error}", flush=True)
        capture.apply_rank(generators)
        return _build(task, config, distributed, resumes), None
    return deferred.model, deferred if deferred.parameters else None


def build_whole(
    task: Task,
    config: Config,
    distributed: DistributedConfig,
    deferred: Deferred,
    *,
    resumes: bool = False,
) -> nn.Module:
    """Return the model with its weights, as from a build without a recording; generators stay unchanged."""
    now = capture.capture_rank()
    seed_alike(config.seed)
    model = deferred.rebuild(lambda: _build(task, config, distributed, resumes))
    capture.apply_rank(now)
    deferred.tape.clear()
    return model


def all_deferred(
    deferred: Deferred | None, config: Config, distributed: DistributedConfig, ranks: Ranks
) -> bool:
    """Return True if all ranks have deferred the build of the same parameters. Collective.

    Ranks may build differently, because rank 0 computes all values: for example only rank 0 reads a file.
    """
    if not _wanted(config, distributed):
        return False
    mine = None if deferred is None else sorted(map(described, deferred.parameters))
    text = None if mine is None else hashlib.sha256(repr(mine).encode()).hexdigest()
    words = ranks.gather(text)
    same = len({*words}) == 1
    if ranks.rank == 0 and not same:
        print(
            "hpcrun: fsdp.deferred_init: build_model() runs on every rank in full: the ranks record "
            "different parameters",
            flush=True,
        )
    return same and words[0] is not None


def covers(task: Task, model: nn.Module) -> bool:
    """Return True if a checkpoint of ``model`` replaces all that depends on its initial weights.

    A model may omit some weights from its state dict, such as frozen weights of another model. An optimizer
    of the task's own may keep the weights that it begins with.
    """
    if type(task).build_optimizer is not Task.build_optimizer:
        return False
    try:
        kept = model.state_dict().keys()
    except Exception:  # of any type: code of the model, which may read values
        return False
    return initial_state(model).keys() <= kept


def for_datasets(
    task: Task,
    config: Config,
    model: nn.Module,
    deferred: Deferred | None,
    *,
    resumes: bool,
    advance: Callable[[], None],
) -> contextlib.AbstractContextManager[Any]:
    """Return the context in which ``task`` makes its datasets, which see the weights of a new training.

    ``advance``: called after each draw of a deferred build that the datasets' draws must follow.
    """
    if deferred is not None:
        return LaterDraws(deferred, advance)
    source = config.train.init_from
    if source is None or not (resumes and covers(task, model)):
        return contextlib.nullcontext()
    return LoadedAtUse(model, source)


def _build(task: Task, config: Config, distributed: DistributedConfig, resumes: bool) -> Any:
    model = task.build_model()
    if config.train.sync_batchnorm:
        on_gpu = bool(distributed.device_ids)
        model = synchronized(model, ranks=distributed.world_size, on_gpu=on_gpu)
    source = config.train.init_from
    if source is None or not isinstance(model, nn.Module) or (resumes and covers(task, model)):
        return model
    load_initial_weights(model, source)
    return model


def _wanted(config: Config, distributed: DistributedConfig) -> bool:
    if distributed.world_size == 1 or config.fsdp.deferred_init is False:
        return False
    if config.train.parallel == "auto":
        # Most of these models fit a device; recording would delay every start.
        return config.fsdp.deferred_init is True and only_ddp(config) is None
    return config.train.parallel == "fsdp"
