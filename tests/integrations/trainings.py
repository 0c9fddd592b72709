"""Small trainings with transformers and Accelerate, each in the form in which their users write it."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from .loops import At, digest, nothing


class Tokens(Dataset):
    """Sequences of 8 tokens; ``noisy``: with a random token from the global generators."""

    def __init__(self, size: int, *, noisy: bool) -> None:
        self.size, self.noisy = size, noisy

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        tokens = torch.randint(0, 32, (8,), generator=torch.Generator().manual_seed(index))
        if self.noisy:
            tokens[int(torch.randint(0, 8, ()))] = random.randrange(32)
        return {"input_ids": tokens, "labels": tokens.clone()}


def trainer(folder: Path, at: At = nothing, callbacks: Any = (), **options: Any) -> Any:
    """Return a Trainer of a small GPT-2 with dropout, accumulation and an uneven last batch."""
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
    )

    from hpcrun.integrations.transformers import ExactResume

    class Interrupted(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            at(state.global_step)

    torch.manual_seed(3)
    sizes = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    given = {
        **{"num_train_epochs": 3, "per_device_train_batch_size": 3, "learning_rate": 1e-2},
        # 39 samples: 7 batches for each of 2 ranks, so 4 steps in an epoch, the last of one batch.
        **{"gradient_accumulation_steps": 2, "logging_steps": 3, "save_steps": 5},
        **{"dataloader_num_workers": 2, "dataloader_pin_memory": False, "use_cpu": True},
        **{"report_to": [], "disable_tqdm": True, **options},
    }
    return Trainer(
        GPT2LMHeadModel(GPT2Config(**sizes)),
        TrainingArguments(output_dir=str(folder), **given),
        train_dataset=Tokens(39, noisy=True),
        eval_dataset=Tokens(10, noisy=False),
        callbacks=[ExactResume(), Interrupted(), *callbacks],
    )


def logged(state: Any) -> list[Mapping[str, Any]]:
    """Return the losses and norms in the log of a Trainer, without times."""
    known = ("step", "loss", "grad_norm", "eval_loss")
    lines = [{name: line[name] for name in known if name in line} for line in state.log_history]
    return [line for line in lines if len(line) > 1]


def with_trainer(folder: Path, at: At = nothing, **options: Any) -> tuple[str, int, Any]:
    """Train; return a hash of the weights, the number of steps, and the log."""
    one = trainer(folder, at, **options)
    one.train()
    return digest(one.model), one.state.global_step, logged(one.state)


def with_accelerate(
    folder: Path | None, at: At = nothing, every: int = 5, **data: Any
) -> tuple[str, int]:
    """Train three epochs with PowerSGD and evaluations; return a hash of the weights and the steps."""
    from accelerate import Accelerator
    from accelerate.utils import DDPCommunicationHookType, DistributedDataParallelKwargs

    from hpcrun.integrations.accelerate import exact_resume

    # The error feedback of PowerSGD is a state of each rank.
    powersgd = DistributedDataParallelKwargs(
        comm_hook=DDPCommunicationHookType.POWER_SGD,
        comm_state_option={"matrix_approximation_rank": 2, "start_powerSGD_iter": 3},
    )
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, kwargs_handlers=[powersgd])
    torch.manual_seed(3)
    model: Any = nn.Sequential(
        nn.Embedding(32, 8), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 32)
    )
    optimizer: Any = torch.optim.AdamW(model.parameters(), 1e-2)
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
    loader = DataLoader(Tokens(39, noisy=True), 3, shuffle=True, **{"num_workers": 2, **data})
    valid = DataLoader(Tokens(10, noisy=True), 3, num_workers=1, persistent_workers=True)
    model, optimizer, schedule, loader, valid = accelerator.prepare(
        model, optimizer, schedule, loader, valid
    )
    state = exact_resume(accelerator, folder, every=every)
    for _ in state.epochs(3):
        model.train()
        for batch in state.batches(loader):
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(batch["input_ids"]), batch["labels"][:, 0])
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                at(state.steps + 1)
            state.step()
        model.eval()
        with torch.no_grad():
            total = sum(model(batch["input_ids"]).sum() for batch in valid)
        # A parameter that depends on the evaluation, and on random numbers after it.
        change = 1e-6 * accelerator.reduce(total) + 1e-3 * torch.rand(())
        accelerator.unwrap_model(model)[3].bias.data += change
    return digest(accelerator.unwrap_model(model)), state.steps
