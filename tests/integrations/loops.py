"""Small training loops with ``hpcrun.resumable``, each in the form in which PyTorch users write it."""

import hashlib
import os
import random
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy, mse_loss
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    get_worker_info,
)

import hpcrun

EPOCHS = 3
At = Callable[[int], None]
"""Called after the optimizer step of a number, before ``state.step()``."""


class Augmented(Dataset):
    """27 samples with noise from the global generators of python, numpy and torch, and from its own."""

    def __init__(self):
        self.numbers = torch.randn(27, 4, generator=torch.Generator().manual_seed(7))
        self.crop = random.Random(3)

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, index):
        noise = random.random() + np.random.rand() + self.crop.random()
        return self.numbers[index] + torch.rand(4) / 8 + noise / 8, self.numbers[index].sum()


class Lines(IterableDataset):
    """13 samples for each rank, shared by its workers, with noise."""

    def __init__(self):
        self.done = 0

    def __iter__(self):
        info = get_worker_info()
        part = (0, 1) if info is None else (info.id, info.num_workers)
        numbers = list(range(part[0], 13, part[1]))
        while self.done < len(numbers):
            number = float(numbers[self.done])
            self.done += 1
            yield torch.full((4,), number / 13) + torch.rand(4), torch.tensor(number / 13)
        self.done = 0


class SavedLines(Lines):
    """The same, with a state."""

    def state_dict(self):
        return {"done": self.done}

    def load_state_dict(self, state):
        self.done = state["done"]


def net():
    """Return a small network with dropout."""
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))


def nothing(_: int) -> None:
    """Do nothing after a step."""


def fail(_: int) -> None:
    """Fail at any step."""
    raise AssertionError("a finished training has made a step")


def stop(step: int, number: int = signal.SIGUSR1, rank: int = 1) -> At:
    """Return a function that sends a signal to ``rank`` after ``step``."""

    def at(now: int) -> None:
        if now == step and hpcrun.get_rank() == rank:
            os.kill(os.getpid(), number)

    return at


def classic(
    folder: Path,
    at: At = nothing,
    wrap: str = "ddp",
    workers: int = 2,
    epochs: int = EPOCHS,
    every: int = 3,
) -> str:
    """Train with DDP or FSDP2, a shuffled map-style dataset and a schedule; return a hash of the weights."""
    torch.manual_seed(1)
    model = net()
    if wrap == "ddp":
        model = DistributedDataParallel(model)
    elif wrap == "fsdp":
        fully_shard(model[0])
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 60)
    data = Augmented()
    # 14 samples for each of two ranks: four batches of 3, and one of 2.
    sampler = DistributedSampler(data) if wrap != "plain" else None
    loader = DataLoader(
        data, batch_size=3, sampler=sampler, shuffle=sampler is None, num_workers=workers,
        persistent_workers=workers > 1,
    )  # fmt: skip
    parts = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    state = hpcrun.resumable(**parts, every=every, folder=folder)
    for _ in state.epochs(epochs):
        for samples, sums in state.batches(loader):
            optimizer.zero_grad()
            mse_loss(model(samples).squeeze(1), sums).backward()
            optimizer.step()
            scheduler.step()
            at(state.steps + 1)
            state.step()
        torch.rand(3)  # such as a validation, which draws random numbers
    return digest(model)


def pass_over(state, batches, model, optimizer, at: At) -> None:
    """Train on the batches of a pass."""
    for x, y in batches:
        optimizer.zero_grad()
        mse_loss(model(x).squeeze(1), y).backward()
        optimizer.step()
        at(state.steps + 1)
        state.step()


def in_turn(folder: Path, at: At = nothing) -> str:
    """Train in each epoch on one loader, and then on another loader; return a hash of the weights."""
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loaders = [DataLoader(Augmented(), batch_size=9, shuffle=True) for _ in range(2)]
    parts = {"model": model, "optimizer": optimizer, "loader": loaders}
    state = hpcrun.resumable(**parts, every=3, folder=folder, same_samples=True)
    for _ in state.epochs(EPOCHS):
        for loader in loaders:
            pass_over(state, state.batches(loader), model, optimizer, at)
    return digest(model)


def gan(folder: Path, at: At = nothing) -> str:
    """Train two networks against each other, with two optimizers."""
    torch.manual_seed(1)
    nets = {"generator": nn.Linear(3, 4), "critic": net()}
    nets = {name: DistributedDataParallel(one) for name, one in nets.items()}
    adam = {name: torch.optim.Adam(one.parameters(), 0.01) for name, one in nets.items()}
    torch.manual_seed(2 + hpcrun.get_rank())
    loader = DataLoader(Augmented(), batch_size=5, shuffle=True)
    state = hpcrun.resumable(model=nets, optimizer=adam, loader=loader, every=3, folder=folder)
    for _ in state.epochs(EPOCHS):
        for samples, _ in state.batches():
            fake = nets["generator"](torch.randn(len(samples), 3))
            both = torch.cat([samples, fake.detach()])
            real = torch.cat([torch.ones(len(samples), 1), torch.zeros(len(samples), 1)])
            adam["critic"].zero_grad()
            binary_cross_entropy_with_logits(nets["critic"](both), real).backward()
            adam["critic"].step()
            adam["generator"].zero_grad()
            loss = -nets["critic"].module(fake).mean()
            loss.backward()
            adam["generator"].step()
            at(state.steps + 1)
            state.step()
    return digest(*nets.values())


def stream(folder: Path, at: At = nothing, data: type[Lines] = SavedLines) -> str:
    """Train with an iterable dataset and two workers per rank."""
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(data(), batch_size=2, num_workers=2)
    state = hpcrun.resumable(
        model=model, optimizer=optimizer, loader=loader, every=3, folder=folder
    )
    for _ in state.epochs(EPOCHS):
        pass_over(state, state.batches(loader), model, optimizer, at)
    return digest(model)


class Momentum:
    """An optimizer that is not torch's."""

    def __init__(self, model):
        self.weights = list(model.parameters())
        self.moments = [torch.zeros_like(one) for one in self.weights]

    def step(self):
        with torch.no_grad():
            for weight, moment in zip(self.weights, self.moments, strict=True):
                moment.mul_(0.9).add_(weight.grad)
                weight.sub_(0.01 * moment)

    def zero_grad(self):
        for weight in self.weights:
            weight.grad = None

    def state_dict(self):
        return {"moments": self.moments}

    def load_state_dict(self, state):
        self.moments = state["moments"]


def limited(folder: Path, at: At = nothing) -> str:
    """Train with an optimizer that is not torch's, on three batches of each epoch, for 8 steps."""
    torch.manual_seed(1)
    model = DistributedDataParallel(net())
    optimizer = Momentum(model)
    data = Augmented()
    loader = DataLoader(data, batch_size=4, sampler=DistributedSampler(data))
    state = hpcrun.resumable(
        model=model, optimizer=optimizer, loader=loader, every=3, folder=folder
    )
    for _ in state.epochs(9, max_steps=8):
        pass_over(state, state.batches(loader, limit=3), model, optimizer, at)
    assert (state.steps, state.epoch) == (8, 2)
    return digest(model)


def digest(*models: nn.Module) -> str:
    """Return a hash of all weights of this rank."""
    content = hashlib.sha256()
    for model in models:
        for value in model.state_dict().values():
            value = value.to_local() if hasattr(value, "to_local") else value
            content.update(value.numpy().tobytes())
    return content.hexdigest()[:16]


def wide(folder: Path, at: At = nothing) -> str:
    """Train a wider network in DDP: the order in which three ranks add its gradients changes bits."""
    torch.manual_seed(1)
    layers = [nn.Linear(4, 33), nn.Tanh(), nn.Linear(33, 57), nn.Tanh(), nn.Linear(57, 1)]
    model = DistributedDataParallel(nn.Sequential(*layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(2 + hpcrun.get_rank())
    state = hpcrun.resumable(model=model, optimizer=optimizer, every=100, folder=folder)
    while state.steps < 8:
        optimizer.zero_grad()
        model(torch.randn(16, 4)).square().mean().backward()
        optimizer.step()
        at(state.steps + 1)
        state.step()
    state.finish()
    return digest(model)


def tokens(folder: Path, at: At = nothing) -> str:
    """Train without a DataLoader, with gradient accumulation and a batch that is fetched ahead."""
    torch.manual_seed(1 + hpcrun.get_rank())
    text = torch.randint(20, (500,), generator=torch.Generator().manual_seed(3))

    def get_batch():
        starts = torch.randint(len(text) - 5, (4,))
        places = starts[:, None] + torch.arange(5)
        return text[places], text[places + 1]

    model = nn.Sequential(nn.Embedding(20, 8), nn.Dropout(0.1), nn.Linear(8, 20))
    model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    state = hpcrun.resumable(
        model=model, optimizer=optimizer, scaler=scaler, every=3, folder=folder
    )
    step = state.steps
    now, following = state.kept or get_batch()
    while True:
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        for micro in range(2):
            model.require_backward_grad_sync = micro == 1
            loss = cross_entropy(model(now).flatten(0, 1), following.flatten()) / 2
            now, following = get_batch()
            scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        step += 1
        if step > 12:
            break
        at(step)
        state.step(keep=(now, following))
    state.close()
    return digest(model)


def epochs(folder: Path, at: At = nothing, every: int = 1) -> str:
    """Train without a loader and without an optimizer, with a shuffle and a validation in each epoch.

    A momentum is updated by hand, and the validation decides on the learning rate.
    """
    torch.manual_seed(1)
    model = net()
    data = torch.randn(12, 4, generator=torch.Generator().manual_seed(7))
    held = {"rate": 0.1, "best": 9.9, "momentum": [torch.zeros_like(w) for w in model.parameters()]}
    state = hpcrun.resumable(model=model, held=held, folder=folder, every=every)
    for _ in state.epochs(EPOCHS):
        order = torch.randperm(12)
        model.train()
        for i in range(state.position(), 4):
            x = data[order[3 * i : 3 * i + 3]]
            loss = mse_loss(model(x).squeeze(1), x.sum(1))
            with torch.no_grad():
                gradients = torch.autograd.grad(loss, list(model.parameters()))
                for w, g, m in zip(model.parameters(), gradients, held["momentum"], strict=True):
                    w -= held["rate"] * m.mul_(0.9).add_(g)
            at(state.steps + 1)
            state.step()
        model.eval()
        with torch.no_grad():
            worse = mse_loss(model(data).squeeze(1), data.sum(1)) + torch.rand(1)
        if worse.item() > held["best"] - 0.5:
            held["rate"] /= 2
        held["best"] = min(held["best"], worse.item())
    return digest(model)
