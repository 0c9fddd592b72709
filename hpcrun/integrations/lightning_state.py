"""The state of a Lightning Trainer without weights and optimizers: shared by all ranks, and of each rank."""

import sys
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpcrun.errors import UserError
from hpcrun.train.data.exact_loader import ExactLoader

# For `load_from_checkpoint` only, with any object of the user.
_HYPERPARAMETERS = tuple(
    f"{owner}{name}"
    for owner in ("", "datamodule_")
    for name in ("hyper_parameters", "hparams_name", "hparams_type")
)
_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
_META = (
    *("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph"),
    *("add_dataloader_idx", "dataloader_idx", "metric_attribute"),
)
_SUMS = ("value", "cumulated_batch_size")


class TrainerState:
    """Lightning's checkpoint without weights and optimizers, saved and loaded with all its hooks.

    Attributes:
        active: True from the first batch on; before, there is nothing to save.
        finished: True if training has ended.
        saved: the state that was loaded; None in a new training.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self.active = self.finished = False
        self.saved: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Return loops, callbacks, schedulers, precision, the data module, and what hooks have added."""
        if not self.active:
            return {}
        trainer = self._trainer
        strategy, weights = trainer.strategy, trainer.lightning_module.state_dict()
        mine = dict(weights)
        # Lightning would gather the shards, and hpcrun saves weights and optimizers by itself.
        strategy.lightning_module_state_dict = lambda: weights
        strategy.optimizer_state = lambda _: {}
        try:
            checkpoint = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        finally:
            del strategy.lightning_module_state_dict, strategy.optimizer_state
        for name in ("optimizer_states", *_HYPERPARAMETERS):
            checkpoint.pop(name, None)
        loops = checkpoint["loops"] = {"fit_loop": checkpoint["loops"]["fit_loop"]}
        loops["fit_loop"]["state_dict"].pop("combined_loader", None)
        # A hook may have replaced or copied the weights. Only other tensors are saved a second time.
        aliases: dict[str, list[str]] = {}
        for key, value in checkpoint.items():
            if isinstance(value, dict):
                same = [name for name in value if name in mine and value[name] is mine[name]]
                if same:
                    aliases[key] = same
                    checkpoint[key] = {name: value[name] for name in value if name not in set(same)}
        return {
            "checkpoint": checkpoint,
            "aliases": aliases,
            "finished": self.finished,
            "should_stop": trainer.should_stop,
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the result of :meth:`state_dict`, after weights and optimizers."""
        trainer = self._trainer
        self.saved, self.finished = saved, saved["finished"]
        weights = trainer.lightning_module.state_dict()
        checkpoint = dict(saved["checkpoint"])
        for key, names in saved["aliases"].items():
            checkpoint[key] = {name: weights[name] for name in names} | checkpoint[key]
        connector = trainer._checkpoint_connector
        connector._loaded_checkpoint = checkpoint
        try:
            trainer.lightning_module.on_load_checkpoint(checkpoint)
            connector.restore_datamodule()
            connector.restore_callbacks()
            connector.restore_precision_plugin_state()
            connector.restore_loops()
            connector.restore_lr_schedulers()
        finally:
            connector._loaded_checkpoint = {}
        trainer.should_stop = saved["should_stop"]
        begin_anew(trainer.fit_loop)
        if not self.finished:
            # The loop counts the saved epoch again when it enters the epoch.
            progress = trainer.fit_loop.epoch_progress
            for counter in (progress.total, progress.current):
                counter.ready -= 1
                counter.started -= 1

    def enter(self) -> None:
        """Set the progress in the epoch, after the loops have begun the saved epoch."""
        if self.saved is not None and not self.finished:
            loop = self._trainer.fit_loop
            loop.load_state_dict(self.saved["checkpoint"]["loops"]["fit_loop"])
            begin_anew(loop)
            self._trainer.should_stop = self.saved["should_stop"]
        self.saved = None


def begin_anew(loop: Any) -> None:
    """Make a loop and the loops in it behave as in a new training, with the progress that they have."""
    loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for inner in vars(loop).values():
        if hasattr(inner, "_resuming_from_checkpoint"):
            begin_anew(inner)


class RankState:
    """Position in the data, logged values of the epoch, states of torchmetrics, and pending gradients.

    Args:
        trainer: the Trainer.
        loaders: the training's loaders, once Lightning has made them.

    Attributes:
        active: True from the first batch on; before, there is nothing to save.
    """

    def __init__(self, trainer: Any, loaders: list[ExactLoader]) -> None:
        self._trainer, self._loaders = trainer, loaders
        self.active = False
        self._saved: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return the state between two batches: plain data and tensors."""
        if not self.active:
            return {}
        trainer = self._trainer
        fetcher, connector = trainer.fit_loop._data_fetcher, trainer._logger_connector
        # For a loader without a length, Lightning fetches a batch ahead to know the last batch.
        ahead = len(getattr(fetcher, "batches", ()))
        if ahead and len(self._loaders) > 1:
            raise UserError(
                "train_dataloader: of several loaders, one has no length; define __len__ of its dataset"
            )
        return {
            "loaders": [loader.state_dict(loader.batches - ahead) for loader in self._loaders],
            "fetched": fetcher.fetched - ahead,
            "consumed": list(getattr(fetcher.combined_loader._iterator, "_consumed", ())),
            "results": [_saved_result(*item) for item in self._results().items()],
            "metrics": {name: _metric_state(metric) for name, metric in self._metrics()},
            "logged": {name: dict(getattr(connector, name)) for name in _LOGGED},
            "first": connector._first_loop_iter,
            "function": connector._current_fx,
            "gradients": self._gradients(),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load the logged values, and keep the other results of :meth:`state_dict` for :meth:`enter`."""
        self._saved = _moved(saved, self._trainer.strategy.root_device)
        _set(self._trainer._logger_connector, self._saved["logged"])

    def enter(self, fetcher: Any, *, finished: bool) -> None:
        """Restore the state at the first batch.

        Args:
            fetcher: Lightning's iterator of batches.
            finished: True if the saved training has ended, and this training begins a further epoch.
        """
        saved, self._saved = self._saved, {}
        _set(self._trainer._logger_connector, saved["logged"])
        for loader, state in zip(self._loaders, saved["loaders"], strict=True):
            loader.load_state_dict(state)
        iter(fetcher)
        if finished:
            iter(fetcher)  # the pass after the saved pass
            return
        fetcher.fetched += saved["fetched"]
        if saved["consumed"]:
            fetcher.combined_loader._iterator._consumed = saved["consumed"]
        self._load_results(saved["results"])
        for name, metric in self._metrics():
            _set(metric, saved["metrics"][name])
        connector = self._trainer._logger_connector
        connector._first_loop_iter, connector._current_fx = saved["first"], saved["function"]
        parameters = dict(self._trainer.lightning_module.named_parameters())
        for name, gradient in saved["gradients"].items():
            parameters[name].grad = gradient

    def _results(self) -> dict[str, Any]:
        results: dict[str, Any] = self._trainer.fit_loop.epoch_loop._results
        return results

    def _metrics(self) -> list[tuple[str, Any]]:
        """Return the torchmetrics in the module, by name: their states are not in its state_dict()."""
        found = self._trainer.lightning_module.named_modules()
        return [(name, part) for name, part in found if _is_metric(part)]

    def _gradients(self) -> dict[str, Tensor]:
        """Return the gradients that the next step may use: Lightning cannot know when they are zeroed."""
        module = self._trainer.lightning_module
        if module.automatic_optimization:
            return {}
        found = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
        if any(isinstance(gradient, DTensor) for gradient in found.values()):
            raise UserError(
                "manual optimization leaves sharded gradients after training_step, which are not in a "
                "checkpoint; call optimizer.zero_grad() after each optimizer.step()"
            )
        return found

    def _load_results(self, saved: list[dict[str, Any]]) -> None:
        """Make Lightning's containers of logged values again, with their sums of this epoch."""
        results = self._results()
        results.clear()
        for item in saved:
            home: Any = sys.modules[type(results).__module__]
            meta = home._Metadata(**item["meta"], reduce_fx=getattr(torch, item["reduce"]))
            meta.sync = home._Sync(
                self._trainer.strategy.reduce, item["should"], item["rank_zero_only"]
            )
            metric = home._ResultMetric(meta, item["is_tensor"])
            if not item["is_tensor"]:
                metric.value = self._trainer.lightning_module.get_submodule(
                    item["meta"]["metric_attribute"]
                )
            _set(metric, item["state"])
            results[item["key"]] = metric


def _saved_result(key: str, metric: Any) -> dict[str, Any]:
    meta = metric.meta
    if meta.sync.group is not None:
        raise UserError(
            f"self.log({meta.name!r}, sync_dist_group=…): a group cannot be saved; remove sync_dist_group"
        )
    names = ("has_reset", "_forward_cache", "_computed", "_update_count")
    sums = [name for name in _SUMS if metric.is_tensor and hasattr(metric, name)]
    return {
        "key": key,
        "is_tensor": metric.is_tensor,
        "meta": {name: getattr(meta, name) for name in _META},
        "reduce": meta.reduce_fx.__name__,
        "should": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "state": {name: getattr(metric, name) for name in (*names, *sums)},
    }


def _is_metric(module: Any) -> bool:
    return any(base.__module__ == "torchmetrics.metric" for base in type(module).__mro__)


def _metric_state(metric: Any) -> dict[str, Any]:
    names = (*metric._defaults, "_update_count", "_computed")
    return {name: getattr(metric, name) for name in names}


def _set(target: Any, values: dict[str, Any]) -> None:
    for name, value in values.items():
        setattr(target, name, value)


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(child, device) for key, child in value.items()}
    if isinstance(value, list):
        return [_moved(child, device) for child in value]
    return value
