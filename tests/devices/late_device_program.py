"""Program of ``test_late_device.py``: parts of hpcrun on the late device, each also with a planted fault.

``python -m tests.devices.late_device_program`` prints a JSON object: for each part, whether its numbers are
right as it is and whether they are still right with the fault; and a list of what is wrong in a whole run.
"""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hpcrun.checkpoint.folder import folder_engine, folder_store
from hpcrun.devices import accelerator
from hpcrun.ranks.collective import Ranks
from hpcrun.train.metrics.log import LossWindow
from hpcrun.train.step.amp_trainer import AMPTrainer
from hpcrun.worker import leave
from tests.devices import late_device, late_run

STEPS = 6
OVERFLOWS = 2
"""Step with gradients that are not finite: the gate skips it, and the host learns of it one step later."""


def trainer(device: str, seed: int = 0) -> AMPTrainer:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))
    return AMPTrainer(
        model,
        lambda module: torch.optim.AdamW(module.parameters(), lr=0.1, fused=True),
        device=device,
        clip_norm=1.0,
    )


def batch(step: int) -> Tensor:
    values = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    return values * float("inf") if step == OVERFLOWS else values


def loss(module: nn.Module, values: Tensor) -> Tensor:
    return module(values).square().mean()


def weights(trained: AMPTrainer) -> list[Any]:
    return [value.detach().cpu().tolist() for value in trained.module.parameters()]


def decisions(device: str) -> Any:
    """Return the decision about each step, the gate's counts, and the last weights."""
    trained = trainer(device)
    results = [trained.training_step(batch(step), loss) for step in range(STEPS)]
    skipped = [result.skipped for result in results]
    return skipped, trained.gate.skipped, trained.gate.steps, weights(trained)


def saved(device: str) -> Any:
    """Save after the fourth step, train on, and return the weights of the checkpoint."""
    trained, again = trainer(device), trainer("cpu", seed=1)
    with tempfile.TemporaryDirectory() as place:
        pinned = accelerator.is_accelerator(trained.device)
        engine = folder_engine(folder_store(place), Ranks(), pinned=pinned)
        for step in range(STEPS):
            if step == 4:
                trained.start_checkpoint(engine, step)
            trained.training_step(batch(step), loss)
        assert engine.wait()[-1].ok
        assert again.load_checkpoint(Path(place)) is not None
    return weights(again)


def resumed(device: str) -> Any:
    """Return the last weights of a training that is interrupted after the fourth step."""
    with tempfile.TemporaryDirectory() as place:
        first, second = trainer(device), trainer(device, seed=1)
        for step in range(4):
            first.training_step(batch(step), loss)
        assert first.save_checkpoint(Path(place), 4).ok
        assert second.load_checkpoint(Path(place)) is not None
        for step in range(4, STEPS):
            second.training_step(batch(step), loss)
    return weights(second)


def mean_loss(device: str, hasty: bool = False) -> float:
    """Return the mean loss of a metrics line; ``hasty``: read with copies without a wait."""
    trained, window = trainer(device), LossWindow()
    for step in range(OVERFLOWS):
        result = trained.training_step(batch(step), loss)
        if hasty:
            early = result.loss.to("cpu", non_blocking=True)
            result = SimpleNamespace(loss=early, decision=result.decision)  # type: ignore[assignment]
        window.results.append(result)
    return window.mean()


def batches(device: str, reused: bool = False) -> Any:
    """Return the weights after steps on batches; ``reused``: all are in one page-locked buffer."""
    trained, buffer = trainer(device), torch.zeros(4, 8)
    for step in range(STEPS):
        values = buffer.copy_(batch(step)) if reused else batch(step)
        trained.training_step(values, loss)
    return weights(trained)


def played(honest: Callable[[str], Any], planted: Callable[[str], Any]) -> dict[str, bool]:
    right = repr(honest("cpu"))
    with late_device.plugged():
        as_it_is = repr(honest(late_device.KIND)) == right
        return {"right": as_it_is, "right with the fault": repr(planted(late_device.KIND)) == right}


def without(name: str, part: Callable[[str], Any]) -> Callable[[str], Any]:
    """Return ``part`` with a function of the seam that does nothing."""

    def planted(device: str) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(accelerator, name, lambda *_: None)
            return part(device)

    return planted


def main() -> None:
    torch.set_num_threads(1)  # The tensors are small, and waiting threads use processor time.
    late_device.register()
    found = {
        "readback of the decision": played(decisions, without("record", decisions)),
        "staging of a checkpoint": played(saved, without("synchronize_stream", saved)),
        "resume": played(resumed, without("synchronize_stream", resumed)),
        "readback of the loss": played(mean_loss, lambda device: mean_loss(device, hasty=True)),
        "copy of a batch": played(batches, lambda device: batches(device, reused=True)),
    }
    with late_device.plugged(), tempfile.TemporaryDirectory() as place:
        wrong = late_run.problems(Path(place))
    print(json.dumps({"parts": found, "wrong in a whole run": wrong}))


if __name__ == "__main__":
    main()
    leave(
        0
    )  # As a rank. In an interpreter that shuts down, autograd's threads for a device may abort.
