"""Order of samples: a pure function of (seed, epoch, global index) (invariant 5).

A library's random permutation may change with the library's version, and starting in the middle requires the
whole permutation. The permutation here can be computed for any single index: a Feistel network over the
smallest even power of two that holds the dataset, iterated until the result is in range (J. Black,
P. Rogaway, "Ciphers with arbitrary finite domains", CT-RSA 2002). It is not for cryptography.
"""

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]

_ROUNDS = 6
_MASK = np.uint64(0xFFFFFFFFFFFFFFFF)


def samples(positions: Indices, dataset_size: int, seed: int) -> Indices:
    """Return the dataset indices at global ``positions``, counted over all epochs from the start of training.

    Args:
        positions: shape (n,), non-negative.
        dataset_size: number of samples in an epoch; each epoch visits each sample exactly once.

    Returns:
        Shape (n,), each in ``[0, dataset_size)``.

    Raises:
        ValueError: the dataset is empty.
    """
    if dataset_size < 1:
        raise ValueError("a dataset without samples has no order")
    epochs, within = np.divmod(positions.astype(np.int64), dataset_size)
    result = np.empty_like(within)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        result[chosen] = _permute(within[chosen], dataset_size, seed, int(epoch))
    return result


def divide(span: range, rank: int, world_size: int, accumulation: int) -> list[Indices]:
    """Return the part of ``span`` for ``rank``, one array per micro-batch.

    The sizes of micro-batches differ by at most one; with too few positions some are empty.
    """
    share, over = divmod(len(span), world_size * accumulation)
    parts = []
    for micro in range(accumulation):
        part = micro * world_size + rank
        first = span.start + part * share + min(part, over)
        parts.append(first + np.arange(share + (part < over), dtype=np.int64))
    return parts


def _permute(within: Indices, size: int, seed: int, epoch: int) -> Indices:
    half = max(1, (max(size - 1, 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    values = within.astype(np.uint64)
    outside = np.ones(len(values), dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= np.uint64(size)
    return values.astype(np.int64)


def _feistel(
    values: npt.NDArray[np.uint64], half: int, keys: npt.NDArray[np.uint64]
) -> npt.NDArray[np.uint64]:
    low_bits = np.uint64((1 << half) - 1)
    left, right = values >> np.uint64(half), values & low_bits
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & low_bits)
    joined: npt.NDArray[np.uint64] = (left << np.uint64(half)) | right
    return joined


def _round_keys(seed: int, epoch: int) -> npt.NDArray[np.uint64]:
    # A full mix of each, so that neighboring seeds and epochs are uncorrelated.
    base = _mix(np.array([seed & int(_MASK)], dtype=np.uint64))
    base = _mix(base ^ np.uint64(epoch & int(_MASK)))
    return _mix(base + np.arange(1, _ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Apply the finalizer of SplitMix64 (G. Steele, D. Lea, C. Flood, OOPSLA 2014), modulo 2**64."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: npt.NDArray[np.uint64] = values ^ (values >> np.uint64(31))
    return mixed
