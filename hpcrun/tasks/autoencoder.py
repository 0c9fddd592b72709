"""Variational autoencoder (Kingma and Welling 2013, arXiv:1312.6114) of handwritten digits.

Its loss is an upper bound of the images' code length, in nats per image, because the likelihood fits the
data: a pixel counts the inked points among 16, so it is binomial. The loss is therefore comparable with a
baseline without training: independent pixels with their own frequencies of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hpcrun.config import Config
from hpcrun.drafts import replacing
from hpcrun.tasks import digits
from hpcrun.tasks.digits_task import Batch, DigitsTask
from hpcrun.tasks.options.digits import AutoencoderData, AutoencoderShape

PIXELS = digits.SIDE**2
SHADES = " .:-=+*#%@"
SHOWN = 5
"""Number of test images in the report's picture."""


@dataclass(frozen=True)
class Bound:
    """The two parts of the negative evidence lower bound, each float [B], in nats; their sum is the loss.

    ``pixels``: cost of the pixels given the code. ``code``: cost of the code, a KL divergence.
    """

    pixels: Tensor
    code: Tensor


class Autoencoder(DigitsTask):
    """Compression of scikit-learn's handwritten digits to a few numbers per image."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.shape = AutoencoderShape.model_validate(config.model.own)
        self.options: AutoencoderData = AutoencoderData.model_validate(config.data.own)

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
        parts = bound(images, *model(images, noise))
        return (parts.pixels + parts.code).mean()

    def report(self, model: nn.Module, validation_loss: float | None) -> dict[str, Any]:
        """Return the bound's parts on the test split, the cost of independent pixels, and a picture."""
        test = self.splits.test
        logits, mean, spread = reconstructed(model, test.images, self._own_noise(test.numbers))
        parts = bound(test.images, logits, mean, spread)
        shown = logits.sigmoid().view_as(test.images)
        if self.options.reconstructions:
            write_images(Path(self.options.reconstructions), test.images, shown, mean)
        losses = {} if validation_loss is None else {"validation_loss": validation_loss}
        return {
            **losses,
            "test_loss": (parts.pixels + parts.code).mean().item(),
            "test_pixels": parts.pixels.mean().item(),
            "test_code": parts.code.mean().item(),
            "test_squared_error": (shown - test.images).square().mean().item(),
            "independent_pixels": independent_pixels(self.splits.train.images, test.images),
            "reconstructions": picture(test.images[:SHOWN], shown[:SHOWN]),
        }

    @cached_property
    def _noise(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.config.seed)
        count = sum(map(len, vars(self.splits).values()))
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


def bound(images: Tensor, logits: Tensor, mean: Tensor, log_variance: Tensor) -> Bound:
    """Return both parts of the bound: images [B, 1, 8, 8] of k / 16, the rest from `AutoencoderNetwork`."""
    share = images.flatten(1)
    ink = share * digits.INK
    ways = (
        torch.lgamma(torch.tensor(digits.INK + 1.0, device=ink.device))
        - torch.lgamma(ink + 1)
        - torch.lgamma(digits.INK - ink + 1)
    )
    points = F.binary_cross_entropy_with_logits(logits, share, reduction="none")
    # Of the normal code distribution from the standard normal one (Kingma and Welling, appendix B).
    divergence = 0.5 * (mean.square() + log_variance.exp() - 1 - log_variance)
    return Bound((digits.INK * points - ways).sum(-1), divergence.sum(-1))


def independent_pixels(train: Tensor, test: Tensor) -> float:
    """Return nats per test image under each pixel's frequencies in ``train``, plus one for each value."""
    known, asked = ((part.flatten(1) * digits.INK).long() for part in (train, test))
    counts = F.one_hot(known, digits.INK + 1).sum(0).double() + 1
    costs = -(counts / counts.sum(-1, keepdim=True)).log()
    return costs.gather(1, asked.T).sum(0).mean().item()


@torch.no_grad()
def reconstructed(model: nn.Module, images: Tensor, noise: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of `AutoencoderNetwork` for the images in evaluation mode, on the CPU."""
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    try:
        logits, mean, log_variance = model(images.to(device), noise.to(device))
    finally:
        model.train(training)
    return logits.cpu(), mean.cpu(), log_variance.cpu()


def picture(images: Tensor, shown: Tensor) -> str:
    """Draw images [N, 1, 8, 8] above their reconstructions, as characters of increasing darkness."""
    return "\n\n".join(_row(part) for part in (images, shown))


def _row(images: Tensor) -> str:
    steps = (images.clamp(0, 1) * (len(SHADES) - 1)).round().long()
    lines = torch.cat(list(steps.squeeze(1)), dim=1).tolist()
    # Each character twice: a character is about half as wide as high.
    return "\n".join("".join(2 * SHADES[step] for step in line).rstrip() for line in lines)


def write_images(path: Path, images: Tensor, shown: Tensor, codes: Tensor) -> None:
    """Write an HDF5 file with ``images``, ``reconstructions`` and ``codes``, replacing it atomically.

    What killed writers of the same file have left is removed first. Raises OSError if it cannot be written.
    """
    import h5py

    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as draft, h5py.File(draft, "w") as file:
        for key, values in (("images", images), ("reconstructions", shown), ("codes", codes)):
            file.create_dataset(key, data=values.numpy())
