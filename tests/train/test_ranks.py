"""Several real gloo ranks train like a single rank; the program ``ranks.py`` runs them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results by scenario and world size, then by rank."""
    folder = tmp_path_factory.mktemp("ranks")
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.ranks", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = {}
    for path in sorted(folder.glob("results-*.json")):
        world_size = int(path.stem.split("-")[1])
        for scenario, value in json.loads(path.read_text()).items():
            found.setdefault((scenario, world_size), []).append(value)
    return found


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("kind", "tolerance"), [("plain", 1e-5), ("accumulated", 1e-5), ("fp16", 0.02), ("bf16", 0.05)]
)
def test_several_ranks_train_like_one_on_the_same_global_batches(
    results, world_size, kind, tolerance
):
    (alone,) = results["twenty_steps", 1]
    for rank in results["twenty_steps", world_size]:
        for what in ("losses", "norms", "weights"):
            for one, several in zip(alone[kind][what], rank[kind][what], strict=True):
                torch.testing.assert_close(
                    torch.tensor(several), torch.tensor(one), rtol=tolerance, atol=tolerance
                )


def test_accumulating_four_micro_batches_gives_the_same_training(results):
    for ranks in (results["twenty_steps", size] for size in (1, 2, 4)):
        for rank in ranks:
            for one, several in zip(
                rank["plain"]["weights"], rank["accumulated"]["weights"], strict=True
            ):
                torch.testing.assert_close(
                    torch.tensor(several), torch.tensor(one), rtol=1e-5, atol=1e-5
                )


@pytest.mark.parametrize("world_size", [2, 4])
def test_all_ranks_have_the_same_bits_after_every_step(results, world_size):
    ranks = results["twenty_steps", world_size]
    for kind in ("plain", "accumulated", "fp16", "bf16"):
        assert all(rank[kind]["weights"] == ranks[0][kind]["weights"] for rank in ranks)
        assert all(rank[kind]["norms"] == ranks[0][kind]["norms"] for rank in ranks)


def test_gradients_are_all_reduced_once_per_step_for_any_micro_batches(results):
    for rank in results["communication", 2]:
        # The model has two buckets.
        assert rank == {"1": 2, "4": 2}


def test_an_overflow_on_one_rank_skips_the_step_on_all(results):
    ranks = results["overflow_on_one_rank", 2]
    for rank in ranks:
        assert rank["skipped"] == [True, False]
        assert rank["untouched"]
        assert rank["scale"] == 32.0
        assert rank["finite"]
    assert ranks[0]["digest"] == ranks[1]["digest"]


def test_the_schedule_waits_while_steps_are_skipped(results):
    for rank in results["overflow_on_one_rank", 2]:
        assert rank["rates"] == [0.05, 0.05, 0.025]


def test_the_bucket_warm_up_changes_no_weight_buffer_or_generator(results):
    assert results["settling_leaves_no_trace", 2] == [True, True]


@pytest.mark.parametrize(
    ("scenario", "world_size"),
    [
        ("resumed_with_several_buckets", 4),
        ("resumed_while_accumulating", 2),
        ("resumed_with_unused_parameters", 4),
        ("resumed_with_buffers_of_its_own", 4),
    ],
)
def test_a_resumed_training_has_the_bits_of_the_undisturbed_one(results, scenario, world_size):
    assert results[scenario, world_size] == [True] * world_size


def test_without_the_bucket_warm_up_a_resume_would_round_differently(results):
    # If this test fails, the extra pass at the start of each process is no longer necessary.
    assert results["resumed_without_settling", 4] == [False] * 4


def test_validation_is_the_mean_over_all_samples_of_the_model_that_rank_0_saves(results):
    ranks = results["validation", 4]
    for rank in ranks:
        assert rank["differ"]
        for size in ("50", "7", "2"):
            ours, reference = rank[size]
            assert ours == pytest.approx(reference, rel=1e-6)
            assert ours == ranks[0][size][0]


def test_validation_leaves_buffers_and_modes_as_they_were(results):
    for rank in results["validation", 4]:
        assert rank["kept"]
        assert rank["modes"] == [True, True, True, False, True]


def test_buffers_in_any_layout_are_rank_0s_on_all_ranks(results):
    bank, table = torch.arange(18.0).reshape(3, 6).T.tolist(), list(range(6))
    for rank in results["buffers_that_nccl_refuses", 4]:
        for parallel in ("ddp", "fsdp"):
            buffers, loss, strides = rank[parallel]
            assert (buffers, strides) == ([bank, table], [1, 6])
            assert loss == results["buffers_that_nccl_refuses", 4][0][parallel][1]


def test_an_error_of_one_rank_stops_all_ranks_and_is_reported_once(results):
    ranks = results["failing_together", 4]
    assert [rank["nobody"] for rank in ranks] == ["fine"] * 4
    assert [rank["rank 0"] for rank in ranks] == [
        "ErrorOnAllRanks: no data on rank 0",
        *["PrintedByRankZero: no data on rank 0"] * 3,
    ]
    kinds = [rank["rank 3"].split(":")[0] for rank in ranks]
    assert kinds == ["ErrorOnAllRanks", *["PrintedByRankZero"] * 3]
    assert ranks[0]["rank 3"].startswith("ErrorOnAllRanks: rank 3 (")
    assert ranks[0]["rank 3"].endswith("): no data on rank 3")
    assert [rank["a defect"].split(":")[0] for rank in ranks] == [
        "PeerFailed",
        "PeerFailed",
        "ZeroDivisionError",
        "PeerFailed",
    ]


def test_every_rank_knows_its_number(results):
    assert results["questions", 4] == [[rank, 4, rank == 0, True, rank == 0] for rank in range(4)]
