"""An optimizer step on one device, against the same step written by hand."""

import copy
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from hpcrun.config import AMPConfig, override_layer, resolve
from hpcrun.ranks.collective import Ranks
from hpcrun.storage.errors import CheckpointError
from hpcrun.train.build import compile_mode
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.model.prepare import Preparation
from hpcrun.train.step import ema as checkpointing
from hpcrun.train.step.trainer import AMPTrainer, DistributedAMPTrainer
from hpcrun.train.validation import validate

FP16 = AMPConfig(dtype="fp16", init_scale=1024.0, growth_interval=1000)


def net(*, dropout=0.0):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 1))


def batch(samples, seed=1):
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(samples, 4, generator=generator)
    return {"inputs": inputs, "targets": inputs.sum(1, keepdim=True)}


def loss(model, batch):
    return (model(batch["inputs"]).float() - batch["targets"]).square().mean()


class Replayed(nn.Module):
    """A model that returns its loss in the same memory every time, as a CUDA graph does."""

    def __init__(self):
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.ones(())), torch.zeros(())

    def forward(self, x):
        value = self.weight * x
        self.out.copy_(value.detach())
        value.data = self.out
        return value


def test_a_loss_in_a_cuda_graph_s_memory_is_kept():
    made = DistributedAMPTrainer(
        Replayed(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.0),
        device="cpu",
        preparation=Preparation(compile="reduce-overhead"),
    )
    results = [
        made.training_step(torch.tensor(x), lambda model, batch: model(batch)) for x in (1.0, 2.0)
    ]
    assert [result.loss.item() for result in results] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("keys", "parallel", "mode"),
    [
        ("train.accumulation=2", "ddp", "default"),
        ("train.micro_batch=4", "ddp", "default"),
        (
            "train.compile_mode=max-autotune train.accumulation=2",
            "ddp",
            "max-autotune-no-cudagraphs",
        ),
        ("train.accumulation=1", "ddp", "reduce-overhead"),
        ("train.accumulation=2", "fsdp", "reduce-overhead"),
        ("train.compile=false", "ddp", None),
    ],
)
def test_several_micro_batches_are_compiled_without_cuda_graphs(keys, parallel, mode, capsys):
    common = ["train.compile=true", "train.compile_mode=reduce-overhead", "train.batch_size=16"]
    config = resolve([override_layer([*common, *keys.split()])])
    gpus = SimpleNamespace(world_size=2, rank=0, device_ids=(0,))
    assert compile_mode(config, gpus, parallel) == mode
    changed = mode in ("default", "max-autotune-no-cudagraphs")
    assert ("captures CUDA graphs" in capsys.readouterr().out) is changed
    on_cpu = SimpleNamespace(world_size=2, rank=0, device_ids=())
    assert compile_mode(config, on_cpu, parallel) in (config.train.compile_mode, None)


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def weights(module):
    return torch.cat([value.flatten() for value in module.state_dict().values()])


def halves(optimizer):
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)


def test_a_step_equals_the_step_written_by_hand():
    module = net()
    twin = copy.deepcopy(module)
    result = AMPTrainer(module, sgd, device="cpu").training_step(batch(8), loss)
    by_hand = sgd(twin)
    value = loss(twin, batch(8))
    value.backward()
    by_hand.step()
    assert torch.equal(weights(module), weights(twin))
    assert result.loss.item() == value.item()
    assert result.gradient_norm is None
    assert not result.skipped
    assert all(parameter.grad is None for parameter in module.parameters())


def test_no_micro_batches_are_refused():
    with pytest.raises(ValueError, match="at least one micro-batch"):
        AMPTrainer(net(), sgd, device="cpu").training_step(MicroBatches([]), loss)


def test_an_optimiser_that_asks_for_a_closure_is_refused():
    module = net()
    with pytest.raises(
        ValueError, match=r"LBFGS.step\(closure\); use an optimizer .* such as SGD or Adam"
    ):
        AMPTrainer(module, torch.optim.LBFGS(module.parameters()), device="cpu")
    made = AMPTrainer(module, lambda model: torch.optim.LBFGS(model.parameters()), device="cpu")
    with pytest.raises(ValueError, match=r"LBFGS.step\(closure\)"):
        made.training_step(batch(4), loss)


def test_a_schedule_that_needs_a_metric_is_refused():
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau
    made = AMPTrainer(net(), sgd, scheduler=plateau, device="cpu")
    for _ in range(2):
        with pytest.raises(ValueError, match=r"ReduceLROnPlateau.step\(metrics\); make it in your"):
            made.training_step(batch(4), loss)
    with pytest.raises(ValueError, match="a function that makes the schedule"):
        AMPTrainer(net(), sgd, scheduler=halves(sgd(net())), device="cpu")


@pytest.mark.parametrize("amp", [AMPConfig(), FP16])
def test_clipping_bounds_the_norm_over_all_parameters_of_the_optimiser(amp):
    module = net()
    before = weights(module)
    trainer = AMPTrainer(module, sgd, amp=amp, clip_norm=0.01, device="cpu")
    result = trainer.training_step(batch(8), loss)
    assert result.gradient_norm > 0.01
    step = (weights(module) - before).norm() / 0.1
    torch.testing.assert_close(step, torch.tensor(0.01), rtol=1e-3, atol=0)


def test_bf16_keeps_the_weights_in_full_precision():
    module = net()
    seen = []

    def watched(model, data):
        out = model(data["inputs"])
        seen.append(out.dtype)
        return (out.float() - data["targets"]).square().mean()

    trainer = AMPTrainer(module, sgd, amp=AMPConfig(dtype="bf16"), device="cpu")
    result = trainer.training_step(batch(8), watched)
    assert seen == [torch.bfloat16]
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert result.loss.dtype == torch.float32
    assert not trainer.scaler.is_enabled()


def test_fp16_undoes_its_loss_scale_in_the_gradients():
    module, twin = net(), net()
    trainer = AMPTrainer(module, sgd, amp=FP16, clip_norm=1e6, device="cpu")
    half = trainer.training_step(MicroBatches([batch(8), batch(8, seed=2)]), loss)
    full = AMPTrainer(twin, sgd, clip_norm=1e6, device="cpu").training_step(
        MicroBatches([batch(8), batch(8, seed=2)]), loss
    )
    torch.testing.assert_close(half.gradient_norm, full.gradient_norm, rtol=1e-2, atol=0)
    torch.testing.assert_close(weights(module), weights(twin), rtol=1e-2, atol=1e-3)
    assert trainer.scaler.get_scale() == 1024.0


def test_training_resumes_after_an_evaluation_with_frozen_parts():
    module = net()
    trainer = AMPTrainer(module, sgd, device="cpu")
    module.eval()
    trainer.training_step(batch(4), loss)
    assert module.training
    module[2].eval()
    trainer.training_step(batch(4), loss)
    assert [part.training for part in module] == [True, True, False, True]


def test_a_checkpoint_returns_the_caller_s_data(tmp_path):
    made = AMPTrainer(net(), sgd, device="cpu")
    assert made.load_checkpoint(tmp_path) is None
    assert made.save_checkpoint(tmp_path, 2, {"best": 0.25}, {"note": "half"}).ok
    restored = AMPTrainer(net(), sgd, device="cpu").load_checkpoint(tmp_path)
    assert (restored.step, restored.shared["extra"]) == (2, {"best": 0.25})
    assert restored.meta == {"note": "half"}


def test_a_folder_of_another_training_is_refused_until_loaded(tmp_path):
    first = AMPTrainer(net(), sgd, device="cpu")
    assert first.save_checkpoint(tmp_path, 1).ok
    first.training_step(batch(4, 1), loss)
    assert first.save_checkpoint(tmp_path, 2).ok
    manifest = (tmp_path / "step-000000002" / "manifest.json").read_bytes()
    torch.manual_seed(1)
    second = AMPTrainer(net(), sgd, device="cpu")
    for save in (second.save_checkpoint, second.start_checkpoint):
        with pytest.raises(
            CheckpointError,
            match=r"up to step 2, .* call load_checkpoint\(\) first, or use another",
        ):
            save(tmp_path, 2)
    assert (tmp_path / "step-000000002" / "manifest.json").read_bytes() == manifest
    assert second.load_checkpoint(tmp_path).step == 2
    assert second.save_checkpoint(tmp_path, 3).ok


def test_a_rank_on_the_cpu_keeps_its_threads(tmp_path, monkeypatch):
    here = torch.get_num_threads()
    torch.use_deterministic_algorithms(True)
    try:
        torch.set_num_threads(here + 2)
        AMPTrainer(net(), sgd, device="cpu").save_checkpoint(tmp_path, 1)
        for wanted, cpus, threads, told in (
            (True, here + 2, here + 2, [f"{here + 2}, as in the checkpoint, for identical bits"]),
            (True, here + 1, here, [f"saved with {here + 2}, but there are only {here + 1} CPUs"]),
            (False, here + 2, here, []),
        ):
            torch.set_num_threads(here)
            torch.use_deterministic_algorithms(wanted)
            monkeypatch.setattr(checkpointing, "available_cpus", lambda cpus=cpus: cpus)
            notes = AMPTrainer(net(), sgd, device="cpu").load_checkpoint(tmp_path).notes
            assert torch.get_num_threads() == threads
            assert len(notes) == len(told)
            assert all(part in note for part, note in zip(told, notes, strict=True))
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_num_threads(here)


def test_validation_does_not_use_the_random_numbers_of_training():
    def drawing(model, batch):
        return loss(model, batch) + torch.rand(()) + random.random() + np.random.rand()

    trainer = AMPTrainer(net(dropout=0.2), sgd, device="cpu")
    before = [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[2]]
    task = SimpleNamespace(loss=drawing, weight=lambda _: None)
    validate(trainer, task, [(batch(4), 4)], ranks=Ranks())
    assert [torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[2]] == before


def test_a_trainer_takes_rank_and_world_size():
    model = nn.Linear(2, 1)
    made = DistributedAMPTrainer(
        model, sgd(model), rank=1, world_size=4, backend="gloo", device_ids=None
    )
    place = made.distributed
    assert (place.rank, place.world_size, place.num_gpus_per_node) == (1, 4, 4)
    assert made.is_distributed
    with pytest.raises(ValueError, match="distributed describes this rank already"):
        DistributedAMPTrainer(model, sgd(model), distributed=place, rank=1)
