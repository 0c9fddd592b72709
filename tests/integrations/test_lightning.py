"""Lightning with one callback: the same bits after interruptions, fallback, refusals."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from hpcrun.errors import UserError
from hpcrun.ranks.signals import STOP, StopReason
from tests.on_ranks import gathered, ranks

pytest.importorskip("lightning", reason="needs Lightning: pip install 'hpcrun[integrations]'")

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.callbacks.lr_finder import LearningRateFinder
from lightning.pytorch.strategies import ModelParallelStrategy

from hpcrun.integrations import lightning as integration
from hpcrun.integrations.lightning import ExactResume
from tests.integrations.lightning_programs import Classifier, Gan, Sharded, loader, validation


class StopAfter(Callback):
    """Sends a signal to the last rank at the end of a batch."""

    def __init__(self, batch: int) -> None:
        self.batch = batch

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        last = trainer.global_rank == trainer.world_size - 1
        if last and trainer.fit_loop.total_batch_idx + 1 == self.batch:
            os.kill(os.getpid(), signal.SIGUSR2)


def train(folder: Path, kind: str, *, stop: int = 0, epochs: int = 2, **options: Any) -> Trainer:
    """Run a user's program as from its first line, and return its Trainer; raises SystemExit at a stop."""
    STOP._reason = StopReason.NONE
    integration._FINISHED.clear()
    seed_everything(5, verbose=False)
    several = int(os.environ.get("WORLD_SIZE", "1"))
    model, callbacks, workers = Classifier(), [ExactResume(folder, every=3)], 0
    settings: dict[str, Any] = {"strategy": "ddp" if several > 1 else "auto"}
    if kind == "workers":
        workers, settings["val_check_interval"] = 1, 2
    elif kind == "accumulation":
        settings["accumulate_grad_batches"] = 2
        callbacks.append(EMAWeightAveraging(decay=0.9))
    elif kind == "gan":
        model, settings["strategy"] = Gan(), "ddp_find_unused_parameters_true"
    elif kind == "sharded":
        model = Sharded()
        settings["strategy"] = ModelParallelStrategy(several, 1)
    trainer = Trainer(
        accelerator="cpu",
        devices=several,
        max_epochs=epochs,
        callbacks=[StopAfter(stop), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings | options,
    )
    trainer.fit(model, loader(workers=workers), validation(workers))
    return trainer


def state(trainer: Trainer) -> dict[str, Any]:
    """Return weights, learning rates and logged values."""
    weights = {
        name: getattr(value, "_local_tensor", value).clone()
        for name, value in trainer.lightning_module.state_dict().items()
    }
    rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": weights, "rates": rates, "logged": logged, "steps": trainer.global_step}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    first, second = one.pop("weights"), other.pop("weights")
    alike = first.keys() == second.keys()
    return alike and one == other and all(torch.equal(first[name], second[name]) for name in first)


@ranks(2, 2, 2, 2)
@pytest.mark.parametrize("kind", ["workers", "accumulation", "gan", "sharded"])
def test_two_stops_in_an_epoch_leave_the_bits_as_undisturbed(
    kind: str, rank: int, phase: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "TORCHELASTIC_RUN_ID": "test"}
    for name, value in place.items():
        monkeypatch.setenv(name, str(value))
    undisturbed = tmp_path / f"undisturbed-{rank}.pt"
    if phase == 0:
        torch.save(state(train(tmp_path / "whole", kind)), undisturbed)
    elif phase < 3:
        with pytest.raises(SystemExit) as stopped:
            train(tmp_path / "parts", kind, stop=1 if phase == 1 else 5)
        assert stopped.value.code == 75
    else:
        trainer = train(tmp_path / "parts", kind)
        assert same(state(trainer), torch.load(undisturbed))
        again = train(tmp_path / "parts", kind)
        assert same(state(again), torch.load(undisturbed))
        assert gathered(again.fit_loop.total_batch_idx) == [23, 23]


@ranks(1)
def test_a_flipped_byte_falls_back_to_the_checkpoint_before(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    whole = state(train(tmp_path / "whole", "plain"))
    with pytest.raises(SystemExit):
        train(tmp_path / "parts", "plain", stop=7)
    newest = max((tmp_path / "parts").glob("step-*"))
    damaged = next(newest.glob("*.bin"))
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2] ^= 1
    damaged.write_bytes(raw)
    capfd.readouterr()
    trainer = train(tmp_path / "parts", "plain")
    said = capfd.readouterr().err
    assert "resumed after step 6" in said
    assert newest.name in said
    assert same(state(trainer), whole)
