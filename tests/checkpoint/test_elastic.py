"""A state resumes on any number of ranks, with DDP, FSDP2 or one process, without a trace in training."""

import json
from collections import Counter

import pytest

from tests.train.forks import run_program

from .elastic import BATCH, SAMPLES, SCENARIOS

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return the results of every scenario of ``elastic.py``: by name, phases, then ranks."""
    folder = tmp_path_factory.mktemp("elastic")
    run_program("tests.checkpoint.elastic", folder)
    return json.loads((folder / "results.json").read_text())


def losses(phases):
    return [loss for ranks in phases for loss in ranks[0]["losses"]]


def samples_by_step(phases):
    found = {}
    for ranks in phases:
        for rank in ranks:
            for step, indices in rank["samples"].items():
                found.setdefault(int(step), []).extend(indices)
    return found


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_sample_of_each_epoch_is_seen_exactly_once(trained, name):
    steps = samples_by_step(trained[name])
    in_order = [steps[step] for step in sorted(steps)]
    assert len(in_order) == 16
    assert all(len(batch) == BATCH for batch in in_order)
    undisturbed = samples_by_step(trained["undisturbed"])
    assert {k: sorted(v) for k, v in steps.items()} == {
        k: sorted(v) for k, v in undisturbed.items()
    }
    # Batches cross epochs: count whole epochs over the stream in the order of samples.
    counted = Counter(index for batch in in_order for index in batch)
    least, over = divmod(16 * BATCH, SAMPLES)
    assert set(counted) == set(range(SAMPLES))
    assert sorted(counted.values()) == [least] * (SAMPLES - over) + [least + 1] * over


@pytest.mark.parametrize("name", ["8 4 2 8", "ddp fsdp single", "fsdp", "fsdp again"])
def test_the_loss_curve_equals_that_of_an_undisturbed_run(trained, name):
    assert losses(trained[name]) == pytest.approx(losses(trained["undisturbed"]), rel=1e-4)
    assert [ranks[0]["start"] for ranks in trained[name]] == [
        0,
        *(until for _, _, until in SCENARIOS[name][:-1]),
    ]


def test_the_same_number_of_ranks_gives_the_same_bits_also_when_sharded(trained):
    assert trained["fsdp again"][-1][0]["weights"] == trained["fsdp"][-1][0]["weights"]
    assert losses(trained["fsdp again"]) == losses(trained["fsdp"])
    assert all(rank["own"] for rank in trained["fsdp again"][1])
    assert trained["fsdp again"][1][0]["notes"] == []


def test_another_number_of_ranks_is_noted(trained):
    for (_, saved, until), (_, now, _), ranks in zip(
        SCENARIOS["8 4 2 8"][:-1], SCENARIOS["8 4 2 8"][1:], trained["8 4 2 8"][1:], strict=True
    ):
        for rank in ranks:
            assert not rank["own"]
            assert rank["notes"][0].startswith(
                f"step {until} was saved by {saved} ranks and is resumed by {now}"
            )


def test_every_rank_writes_one_file_and_replicated_tensors_are_distributed(trained):
    for name, phases in trained.items():
        for (_, world, _), ranks in zip(SCENARIOS[name], phases, strict=True):
            files = [f"rank-{rank:05d}.bin" for rank in range(world)]
            assert ranks[0]["files"] == ["index.json", *files]
            assert ranks[0]["writers"] == files
