"""The bandwidth of a collective, as nccl-tests defines it."""

MIB = 1 << 20
SIZES = (1 * MIB, 4 * MIB, 16 * MIB, 64 * MIB, 256 * MIB)
"""Sizes of the all-reduce in bytes; the largest size that fits the time is measured."""


def bus_bandwidth(size: int, seconds: float, ranks: int) -> float:
    """Return the bus bandwidth in bytes per second: size / time x 2 (n - 1) / n.

    The factor makes the figure comparable with the speed of the links, whatever the number of ranks.
    """
    return size / max(seconds, 1e-9) * 2 * (ranks - 1) / ranks
