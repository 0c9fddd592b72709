"""The measured models. Without torch, because gpu.py needs the names before a heavy import."""

from dataclasses import dataclass

FP32, BF16 = 16, 8
"""Bytes that a parameter takes with its gradient and Adam's two moments, by how it is kept."""


@dataclass(frozen=True)
class Size:
    """A model and its batch: samples of ``context`` tokens per step."""

    layers: int
    width: int
    heads: int
    context: int
    batch: int
    recompute: bool
    vocabulary: int = 256

    @property
    def parameters(self) -> int:
        """Return the weights of the blocks and the embedding, which is the head too, without norms."""
        return 12 * self.layers * self.width**2 + self.vocabulary * self.width

    @property
    def flops_per_token(self) -> float:
        """Return six operations per parameter plus attention (Chowdhery et al. 2022, PaLM, appendix B)."""
        return 6 * self.parameters + 12 * self.layers * self.width * self.context


SIZES = {
    "tiny": Size(2, 64, 4, 64, 4, recompute=False),
    "1b": Size(20, 2048, 16, 2048, 8, recompute=False, vocabulary=50304),
    "7b": Size(34, 4096, 32, 2048, 4, recompute=True, vocabulary=50304),
}


def kept_in(size: Size, free: float) -> str | None:
    """Return the precision of the weights on a device with ``free`` bytes: fp32, bf16, or None.

    None means that neither fits. The rest of the memory is for activations: a fifth of the device, or a
    tenth with bf16, which has smaller activations.
    """
    if size.parameters * FP32 < 0.8 * free:
        return "fp32"
    return "bf16" if size.parameters * BF16 < 0.9 * free else None
