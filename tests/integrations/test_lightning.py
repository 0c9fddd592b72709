"""Lightning with one callback: the same bits after interruptions, fallback, refusals."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from hpcrun.errors import UserError
from tests.on_ranks import agreed, ranks

pytest.importorskip("lightning", reason="needs Lightning: pip install 'hpcrun[integrations]'")

from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import EMAWeightAveraging
from lightning.pytorch.callbacks.lr_finder import LearningRateFinder
from lightning.pytorch.plugins.environments import SLURMEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy

from hpcrun.integrations.lightning import ENDED, ExactResume
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
    ENDED.clear()
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
        name: (value.to_local() if isinstance(value, DTensor) else value).clone()
        for name, value in trainer.lightning_module.state_dict().items()
    }
    rates = [group["lr"] for one in trainer.optimizers for group in one.param_groups]
    logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": weights, "rates": rates, "logged": logged, "steps": trainer.global_step}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    first, second = one.pop("weights"), other.pop("weights")
    alike = first.keys() == second.keys()
    return alike and one == other and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    "kind",
    [
        *(
            pytest.param(kind, marks=ranks(2, 2, 2, 2))
            for kind in ("workers", "accumulation", "gan", "sharded")
        ),
        pytest.param("three ranks", marks=ranks(3, 3, 3, 3)),
    ],
)
def test_two_stops_in_an_epoch_leave_the_bits_as_undisturbed(
    kind: str,
    rank: int,
    phase: int,
    tmp_path: Path,
    again: Callable[[], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    again()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "test")
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
        finished = train(tmp_path / "parts", kind)
        assert same(state(finished), torch.load(undisturbed))
        assert agreed(finished.fit_loop.total_batch_idx) == trainer.fit_loop.total_batch_idx


@ranks(1, 1)
def test_a_flipped_byte_falls_back_to_the_checkpoint_before(
    phase: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    if phase == 0:
        torch.save(state(train(tmp_path / "whole", "plain")), tmp_path / "whole.pt")
        with pytest.raises(SystemExit):
            train(tmp_path / "parts", "plain", stop=7)
        return
    newest = max((tmp_path / "parts").glob("step-*"))
    damaged = next(newest.glob("*.bin"))
    raw = bytearray(damaged.read_bytes())
    raw[len(raw) // 2] ^= 1
    damaged.write_bytes(raw)
    trainer = train(tmp_path / "parts", "plain")
    said = capfd.readouterr().err
    assert "resumed after step 6" in said
    assert newest.name in said
    assert same(state(trainer), torch.load(tmp_path / "whole.pt"))


def fit(folder: Path, data: Any = None, callbacks: Any = (), **settings: Any) -> Trainer:
    """Train on one rank without output; return the Trainer."""
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=1,
        callbacks=[ExactResume(folder), *callbacks],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **settings,
    )
    trainer.fit(Classifier(), data or loader(size=8), validation())
    return trainer


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"reload_dataloaders_every_n_epochs": 1}, "set it to 0"),
        ({"val_check_interval": "00:00:01:00"}, "give a number of batches"),
        ({"callbacks": [LearningRateFinder()]}, "with another Trainer"),
        ({"data": [torch.zeros(1)]}, "DataLoader"),
    ],
)
@ranks(1)
def test_what_cannot_be_exact_is_refused_before_training(
    settings: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        fit(tmp_path / "saved", **settings)
    assert not (tmp_path / "saved").exists()


@ranks(1)
def test_a_second_trainer_needs_its_own_folder(tmp_path: Path) -> None:
    fit(tmp_path / "saved")
    with pytest.raises(UserError, match="two Trainers of this program"):
        fit(tmp_path / "saved")


@ranks(1)
def test_a_trainer_on_too_few_ranks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SLURMEnvironment, "detect", SLURMEnvironment.detect)
    for name, value in {
        "HPCRUN_RUN": str(tmp_path),
        "WORLD_SIZE": "4",
        "GROUP_WORLD_SIZE": "2",
    }.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=r"devices=2, num_nodes=2"):
        fit(tmp_path / "saved")
    assert not SLURMEnvironment.detect()


@ranks(1)
def test_lightning_does_not_requeue_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Warn(Callback):
        def on_train_start(self, *_: Any) -> None:
            os.kill(os.getpid(), signal.SIGUSR1)  # Lightning's signal for a requeue

    place = {"NTASKS": 1, "PROCID": 0, "LOCALID": 0, "NODEID": 0, "JOB_ID": 7}
    for name, value in place.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))
    with pytest.raises(SystemExit) as stopped:
        fit(
            tmp_path / "saved",
            callbacks=[Warn()],
            plugins=[SLURMEnvironment()],
            default_root_dir=tmp_path,
        )
    assert stopped.value.code == 75
    assert not [*tmp_path.rglob("hpc_ckpt*")]
