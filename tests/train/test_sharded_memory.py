"""Memory of sharded models, deferred builds and micro-batches; ``sharded_memory.py`` runs the ranks."""

import json

import pytest
import torch

from tests.train.forks import run_program
from tests.train.sharded_memory import WORLDS


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results by world size, then by rank."""
    folder = tmp_path_factory.mktemp("memory")
    run_program("tests.train.sharded_memory", folder)
    return {
        size: [json.loads((folder / f"{size}-{rank}.json").read_text()) for rank in range(size)]
        for size in WORLDS
    }


def test_a_deferred_build_gives_all_ranks_the_weights_of_a_normal_build(results):
    expected = results[2][0]["built"]["normal"]["bits"]
    for ranks in results.values():
        for rank in ranks:
            for name, found in rank["built"].items():
                assert found["sharded"], name
                assert found["deferred"] == (name != "normal")
                assert found["bits"] == expected, name


def test_a_deferred_build_trains_as_a_normal_build(results):
    for ranks in results.values():
        for rank in ranks:
            normal, deferred = rank["built"]["normal"], rank["built"]["deferred"]
            assert (deferred["loss"], deferred["trained"]) == (normal["loss"], normal["trained"])


def test_reducing_each_micro_batch_holds_no_unsharded_gradients(results):
    parameters = 4 * (64 * 64 + 64)
    for ranks in results.values():
        for rank in ranks:
            ways = rank["accumulated"]
            assert {name: way["held"] for name, way in ways.items()} == {
                "True": 0,
                # A small model sends its gradients once per step.
                "False": 4 * parameters,
                "auto": 4 * parameters,
            }
            for each, last in zip(ways["True"]["weights"], ways["False"]["weights"], strict=True):
                torch.testing.assert_close(torch.tensor(each), torch.tensor(last))
            assert ways["auto"]["weights"] == ways["False"]["weights"]
