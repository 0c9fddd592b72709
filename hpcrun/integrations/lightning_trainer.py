"""The state of a Lightning Trainer that all ranks share, without weights and optimizers."""

from typing import Any

# For `load_from_checkpoint` only, with any object of the user.
_HYPERPARAMETERS = tuple(
    f"{owner}{name}"
    for owner in ("", "datamodule_")
    for name in ("hyper_parameters", "hparams_name", "hparams_type")
)


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
