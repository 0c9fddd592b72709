"""The memory estimate of ``train.parallel: auto``, and its message."""

import pytest

from hpcrun.train.parallel.memory_estimate import HEADROOM, Need, fits, need, summary


def test_adam_needs_four_times_the_weights_and_frozen_weights_count_once():
    wanted = need([(1000, 4, True), (500, 4, False)], moments=2)
    assert wanted == Need(weights=6000, gradients=4000, optimizer=8000)
    assert wanted.total == 18000


@pytest.mark.parametrize(
    ("moments", "bucket_view", "total"),
    [(0, True, 8), (1, True, 12), (2, False, 20), (3, True, 20)],
)
def test_moments_and_separate_buckets_count(moments, bucket_view, total):
    assert need([(1, 4, True)], moments=moments, bucket_view=bucket_view).total == total


def test_a_model_of_bf16_weights_takes_half():
    assert need([(1000, 2, True)], moments=2).total == 8000


def test_seven_billion_parameters_with_adam_fit_no_device_of_80_gigabytes():
    # 7e9 x 4 bytes x (weights, gradients, two moments) = 112 GB.
    assert not fits(need([(7_000_000_000, 4, True)], moments=2), 80_000_000_000)
    assert fits(need([(1_000_000_000, 4, True)], moments=2), 80_000_000_000)


def test_memory_is_reserved_for_activations():
    free = 1000
    taken = round(free * (1 - HEADROOM))
    assert fits(Need(taken, 0, 0), free)
    assert not fits(Need(taken + 1, 0, 0), free)


def test_the_estimate_is_reported_in_one_line_with_its_figures():
    line = summary(need([(7_000_000_000, 4, True)], moments=2), 80_000_000_000)
    assert line == (
        "28.0 GB of weights + 28.0 GB of gradients + 56.0 GB of optimizer state = 112.0 GB per rank, "
        "of 80.0 GB; 40% are reserved for activations"
    )
