"""Variational autoencoder (Kingma and Welling 2013, arXiv:1312.6114) of handwritten digits.

    hpcrun submit -c configs/autoencoder.yaml

Its loss is an upper bound of the images' code length, in nats per image, because the likelihood fits the
data: a pixel counts the inked points among 16, so it is binomial. The loss is therefore comparable with a
baseline without training: independent pixels with their own frequencies of values.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.nn import functional as F

from examples.digits import INK, SIDE, Batch, DigitsTask
from hpcrun.config import Config
from hpcrun.config.fields import Count, Section

PIXELS = SIDE**2


class AutoencoderShape(Section):
    """The ``model`` section."""

    hidden: Count = Field(default=128, description="Units of each hidden layer.")
    latent: Count = Field(default=8, description="Length of an image's code.")


class Autoencoder(DigitsTask):
    """Compression of scikit-learn's handwritten digits to a few numbers per image."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shape = AutoencoderShape.model_validate(config.model.own)

    def build_model(self) -> nn.Module:
        return AutoencoderNetwork(self.shape)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the negative bound in nats per image, with one random draw of each image's code.

        In training the draw is from the global generators, which a resume restores. In validation each
        image has a fixed draw, so that validations are comparable.
        """
        images, _, numbers = batch
        if model.training:
            noise = torch.randn(len(images), self.shape.latent, device=images.device)
        else:
            noise = self._own_noise(numbers)
        pixels, code = bound(images, *model(images, noise))
        return (pixels + code).mean()

    def report(self, model: nn.Module, validation_loss: float | None) -> dict[str, Any]:
        """Return the bound's parts on the test split, and the cost of independent pixels."""
        test = self.splits["test"]
        logits, *code = self.evaluated(model, test.images, self._own_noise(test.numbers))
        pixels, cost = bound(test.images, logits, *code)
        shown = logits.sigmoid().view_as(test.images)
        losses = {} if validation_loss is None else {"validation_loss": validation_loss}
        return {
            **losses,
            "test_loss": (pixels + cost).mean().item(),
            "test_squared_error": (shown - test.images).square().mean().item(),
            "independent_pixels": independent_pixels(self.splits["train"].images, test.images),
        }

    @cached_property
    def _noise(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed)
        count = sum(map(len, self.splits.values()))
        return torch.randn(count, self.shape.latent, generator=generator)

    def _own_noise(self, numbers: Tensor) -> Tensor:
        return self._noise[numbers.cpu()].to(numbers.device)


class AutoencoderNetwork(nn.Module):
    """Encoder and decoder: images [B, 1, 8, 8] and noise [B, latent] -> logits of ink [B, 64], mean and
    log variance of the code, each [B, latent]."""

    def __init__(self, shape: AutoencoderShape) -> None:
        super().__init__()
        self.encode = nn.Sequential(
            nn.Flatten(),
            nn.Linear(PIXELS, shape.hidden),
            nn.GELU(),
            nn.Linear(shape.hidden, 2 * shape.latent),
        )
        self.decode = nn.Sequential(
            nn.Linear(shape.latent, shape.hidden), nn.GELU(), nn.Linear(shape.hidden, PIXELS)
        )

    def forward(self, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        mean, log_variance = self.encode(images).float().chunk(2, dim=-1)
        code = mean + noise * (0.5 * log_variance).exp()
        return self.decode(code).float(), mean, log_variance


def bound(
    images: Tensor, logits: Tensor, mean: Tensor, log_variance: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the parts of the negative evidence lower bound, each float [B], in nats.

    The first is the cost of the pixels given the code, the second the cost of the code, a KL divergence.
    ``images`` [B, 1, 8, 8] are multiples of 1/16; the rest is from `AutoencoderNetwork`.
    """
    share = images.flatten(1)
    ink = share * INK
    orders = torch.special.gammaln(torch.full_like(ink, INK + 1.0))
    orders = orders - torch.lgamma(ink + 1) - torch.lgamma(INK - ink + 1)
    points = F.binary_cross_entropy_with_logits(logits, share, reduction="none")
    # Of the normal code distribution from the standard normal one (Kingma and Welling, appendix B).
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
    return (INK * points - orders).sum(-1), divergence.sum(-1)


def independent_pixels(train: Tensor, test: Tensor) -> float:
    """Return nats per test image under each pixel's frequencies in ``train``, plus one for each value."""
    known, asked = ((part.flatten(1) * INK).long() for part in (train, test))
    counts = F.one_hot(known, INK + 1).sum(0).double() + 1
    costs = -(counts / counts.sum(-1, keepdim=True)).log()
    return costs.gather(1, asked.T).sum(0).mean().item()
