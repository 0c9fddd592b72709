"""Adversarial training of two nets. Each loss uses both nets: with plain torch, and with two trainers."""

import torch
from torch import nn
from torch.nn import functional as F

from hpcrun.train.data.micro_batches import MicroBatches

STEPS = 5


def nets():
    """Return the generator and the critic, always with the same weights."""
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    return nn.Linear(3, 6), critic


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)


def batches(part=0, parts=1):
    """Return each step's samples and noise, or a rank's part of them."""
    generator = torch.Generator().manual_seed(3)
    for _ in range(STEPS):
        pair = torch.randn(8, 6, generator=generator), torch.randn(8, 3, generator=generator)
        yield tuple(values.chunk(parts)[part] for values in pair)


def critics_loss(critic, generator, samples, noise):
    made = generator(noise).detach()
    return F.softplus(-critic(samples)).mean() + F.softplus(critic(made)).mean()


def generators_loss(generator, critic, noise):
    return F.softplus(-critic(generator(noise))).mean()


def by_hand():
    """Return the weights of both nets after all steps, by plain torch."""
    generator, critic = nets()
    ours, theirs = sgd(generator), sgd(critic)
    for samples, noise in batches():
        theirs.zero_grad()
        critics_loss(critic, generator, samples, noise).backward()
        theirs.step()
        ours.zero_grad()
        generators_loss(generator, critic, noise).backward()
        ours.step()
    return weights(generator, critic)


def by_trainers(trainer, part=0, parts=1):
    """Return the weights with two trainers, which ``trainer`` makes from a net and an optimizer.

    Each step has two micro-batches.
    """
    generator, critic = (trainer(net, sgd) for net in nets())
    for samples, noise in batches(part, parts):
        halves = MicroBatches(zip(samples.chunk(2), noise.chunk(2), strict=True))
        critic.training_step(
            halves, lambda model, batch: critics_loss(model, generator.module, *batch)
        )
        generator.training_step(
            MicroBatches(noise.chunk(2)), lambda model, z: generators_loss(model, critic.module, z)
        )
    return weights(generator.module, critic.module)


def weights(*modules):
    values = (value.detach() for module in modules for value in module.parameters())
    whole = (value.full_tensor() if hasattr(value, "full_tensor") else value for value in values)
    return torch.cat([value.flatten() for value in whole])
