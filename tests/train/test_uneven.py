"""Three ranks with batches that do not divide evenly, against one process with the whole batches."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from hpcrun.errors import UserError
from hpcrun.train.data.batching import Batching
from hpcrun.train.step.micro_batches import MicroBatchStep
from hpcrun.train.step.trainer import DistributedAMPTrainer
from tests.train import uneven

ROOT = Path(__file__).parents[2]
FP16 = "a_short_batch_joined_in_fp16"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of every scenario, by rank."""
    folder = tmp_path_factory.mktemp("uneven")
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.uneven", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(3)]


@pytest.mark.parametrize("scenario", [one.__name__ for one in uneven.COMPARED])
def test_three_ranks_train_like_one_process_on_the_same_batches(results, scenario):
    tolerance = 1e-3 if scenario == FP16 else 1e-5
    for found in (one[scenario] for one in results):
        assert found["alike"]
        for kind in ("losses", "weights"):
            ours, expected = map(torch.tensor, found[kind])
            torch.testing.assert_close(ours, expected, rtol=tolerance, atol=tolerance)


def test_the_samples_differ_between_the_ways_with_a_short_batch(results):
    first = results[0]
    across, padded, dropped = (
        first[name]["losses"][0]
        for name in (
            "a_batch_that_does_not_divide",
            "a_short_batch_padded",
            "a_short_batch_dropped",
        )
    )
    for others in (padded, dropped):
        assert others[:3] == pytest.approx(across[:3], rel=1e-5)
    assert len({round(losses[3], 4) for losses in (across, padded, dropped)}) == 3


@pytest.mark.parametrize("way", list(uneven.RESUMED))
def test_a_stop_before_the_short_batch_changes_no_bit_of_weights_or_averages(results, way):
    averaged = 4 if "ema" in uneven.RESUMED[way] else 0
    for found in results:
        assert found[f"resumed-{way}"] == {"weights": True, "averages": True, "averaged": averaged}


def test_a_resume_on_fewer_ranks_takes_the_same_batches(results):
    after, always = map(torch.tensor, results[0]["fewer"])
    torch.testing.assert_close(after, always, rtol=1e-5, atol=1e-5)


def test_validation_is_the_mean_over_all_tokens_with_the_averaged_weights(results):
    for found in (one["validated"] for one in results):
        assert found["found"] == results[0]["validated"]["found"]
        assert found["found"] == pytest.approx([found["averaged"]] * 2, rel=1e-5)
        assert found["plain"] != pytest.approx(found["averaged"], rel=1e-3)


def test_averages_are_saved_in_shards_and_load_whole(results):
    for found in results:
        assert found["averaged"] == {"sharded": True, "same": True, "close": True}


def test_a_model_that_waits_for_all_ranks_in_its_forward_pass_cannot_be_joined():
    class Synchronised(uneven.Plain):
        def build_model(self):
            return nn.Sequential(nn.Linear(6, 3), nn.SyncBatchNorm(3), nn.Linear(3, 1))

    task = Synchronised()
    trainer = DistributedAMPTrainer(
        task.build_model(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        device="cpu",
    )
    MicroBatchStep(trainer, task, Batching(8, 1, 1, "pad", 20))
    with pytest.raises(
        UserError, match=r"^train.uneven=join excludes ranks .* 1 in the model is a SyncB"
    ):
        MicroBatchStep(trainer, task, Batching(8, 1, 1, "join", 20))


def test_a_task_that_weights_only_some_batches_is_refused():
    class Fickle(uneven.Plain):
        def weight(self, batch):
            return None if batch else 2.0

    trainer = DistributedAMPTrainer(
        uneven.small(), lambda model: torch.optim.SGD(model.parameters(), lr=0.1), device="cpu"
    )
    take = MicroBatchStep(trainer, Fickle(), Batching(8, 1, 2))
    with pytest.raises(TypeError, match=r"Fickle.weight\(\) gave None for one batch"):
        take(0, [[], [1]])
