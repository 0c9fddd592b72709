"""The same model has the same loss with one process, DDP and FSDP, with any micro-batches or recomputation.

The program ``equivalence.py`` trains 50 steps of AdamW on the same global batches.
Tolerances: fp32 only rounds in another order; bf16 keeps three digits.
"""

import json

import pytest
import torch

from tests.train.equivalence import interrupted_ways, more_interrupted_ways, more_ways, ways
from tests.train.forks import run_program
from tests.train.sharing import Way
from tests.train.sharing_scenarios import OPTIMISERS

LOSSES = {"fp32": 1e-5, "bf16": 0.05}
WEIGHTS = {"fp32": 5e-6, "bf16": 0.03}


def play(folder, *arguments):
    """Return the results by key and number of ranks, then by rank."""
    run_program("tests.train.equivalence", folder, *arguments)
    found = {}
    for path in sorted(folder.glob("results-*.json")):
        for key, value in json.loads(path.read_text()).items():
            found.setdefault(key, []).append(value)
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    return play(tmp_path_factory.mktemp("equivalence"))


@pytest.fixture(scope="module")
def slow_results(tmp_path_factory):
    return play(tmp_path_factory.mktemp("equivalence"), "slow")


def check_same_training(results, way):
    (alone,) = results[Way("single", 1, way.dtype, way.clip).name]
    ranks = results[way.name]
    assert all(rank["losses"] == ranks[0]["losses"] for rank in ranks)
    assert all(rank["norms"] == ranks[0]["norms"] for rank in ranks)
    assert len(ranks[0]["losses"]) == 50
    for what, relative, absolute in (
        ("losses", LOSSES[way.dtype], LOSSES[way.dtype] / 10),
        ("norms", 10 * LOSSES[way.dtype], LOSSES[way.dtype]),
        ("weights", 0.0, WEIGHTS[way.dtype]),
    ):
        torch.testing.assert_close(
            torch.tensor(ranks[0][what]), torch.tensor(alone[what]), rtol=relative, atol=absolute
        )


def check_same_bits(results, way):
    ranks = results[f"stopped {way.name}"]
    assert [rank["same"] for rank in ranks] == [True] * way.ranks
    if way.dtype == "fp16":
        # The scale grew after four steps, so the number of steps since its growth was restored.
        assert all(rank["scale"] == [2048.0, 2048.0] for rank in ranks)
    assert results[f"plain {way.name}"] == [ranks[0]["weights"]]


@pytest.mark.parametrize("way", [*ways()], ids=lambda way: way.name)
def test_every_kind_of_parallelism_gives_the_same_training(results, way):
    check_same_training(results, way)


@pytest.mark.parametrize("way", [*interrupted_ways()], ids=lambda way: way.name)
def test_an_interrupted_training_has_the_bits_of_the_undisturbed_one_and_plain_names(results, way):
    check_same_bits(results, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*more_ways()], ids=lambda way: way.name)
def test_compiled_or_not_it_is_the_same_training(slow_results, way):
    check_same_training(slow_results, way)


@pytest.mark.slow
@pytest.mark.parametrize("way", [*more_interrupted_ways()], ids=lambda way: way.name)
def test_a_compiled_training_has_the_bits_of_the_undisturbed_one_and_plain_names(slow_results, way):
    check_same_bits(slow_results, way)


def test_a_sharded_model_is_validated_on_all_samples_however_few_a_rank_has(results):
    ranks = results["validation_when_sharded"]
    assert len(ranks) == 4
    for found in ranks:
        for size in ("50", "7", "2", "other weights"):
            value, reference = found[size]
            assert value == pytest.approx(reference, rel=1e-5)
            assert value == ranks[0][size][0]
    assert ranks[0]["50"][0] != pytest.approx(ranks[0]["other weights"][0], rel=1e-3)
    assert ranks[0]["goes on"]


def test_gradients_and_kept_weights_are_communicated_once_per_step(results):
    for found in results["communication_when_sharded"]:
        # Gathers and reductions: the root and two blocks, the blocks again for the backward pass.
        assert found == {"True 1": [5, 3], "True 4": [20, 3], "False 1": [3, 3], "False 4": [3, 3]}


def test_a_two_dimensional_mesh_reduces_over_rows_and_columns(results):
    ranks = results["a_mesh_of_its_own_groups"]
    assert [found["row"] for found in ranks] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [found["column"] for found in ranks] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for found in ranks:
        assert found["flat"] == 4
        # Two samples of a rank's number, averaged over the numbers 0 to 3.
        assert found["gradient"] == [3.0]


def test_offloading_on_the_cpu_has_no_effect_and_rank_0_reports_it(results):
    (line, trains), (silence, trains_too) = results["offloading_from_the_cpu"]
    assert line == "hpcrun: fsdp.cpu_offload: the ranks are on the CPU; nothing to offload\n"
    assert silence == ""
    assert trains
    assert trains_too


def test_norms_with_running_statistics_are_the_same_in_half_precision(results):
    for copies, *sharded in results["running_statistics_in_bf16"]:
        for losses in sharded:
            assert losses == pytest.approx(copies, rel=0.02)


def test_the_shipped_gpt_trains_the_same_sharded_by_size_and_replicated(results):
    for copies, sharded in results["the_shipped_gpt_by_size"]:
        assert sharded == pytest.approx(copies, rel=1e-5)


def test_a_shard_that_another_module_reads_is_refused_with_a_remedy(results):
    for said in results["a_use_that_is_found_in_the_step"]:
        assert said.startswith("NotTrainable: train.parallel: fsdp gathers the weights of a part")
        assert "set fsdp.wrap=classes without this part, or use ddp" in said


@pytest.mark.parametrize("name", OPTIMISERS)
def test_every_optimiser_takes_the_same_steps_sharded_with_the_kernels_it_has(results, name):
    rank_0, _ = results["every_optimiser"]
    copies, *sharded = map(torch.tensor, rank_0[name])
    for weights in sharded:
        torch.testing.assert_close(weights, copies, rtol=0.0, atol=WEIGHTS["fp32"])


def test_unused_parameters_are_named_before_a_rank_waits_for_their_gradients(results):
    everywhere, on_one = zip(*results["unused_parameters"], strict=True)
    line = "train.find_unused_parameters: the loss does not depend on spare.weight, spare.bias, and"
    assert everywhere[0].startswith(f"ErrorOnAllRanks: {line}")
    assert everywhere[1].startswith(f"PrintedByRankZero: {line}")
    assert on_one[0].startswith("ErrorOnAllRanks: rank 1 (")
    assert line in on_one[0]
    assert on_one[1].startswith("PrintedByRankZero: rank 1 (")


def test_a_rank_that_skips_part_of_a_sharded_model_is_named_before_a_hang(results):
    first, second = results["unused_when_sharded"]
    beginning = (
        "train.parallel: under fsdp the ranks gather weights and reduce gradients together, but "
    )
    for what, line in (
        ("parameters", "train.find_unused_parameters: the loss of rank 1 "),
        ("its result", f"{beginning}the loss of rank 1 "),
        ("last block", f"{beginning}rank 0 reaches blocks.1 while rank 1 "),
        ("what is given", f"{beginning}the loss of rank 1 "),
        ("any of it", f"{beginning}the loss of rank 1 "),
    ):
        assert all(said.startswith(f"ErrorOnAllRanks: {line}") for said in first[what])
        assert all(said.startswith(f"PrintedByRankZero: {line}") for said in second[what])
    assert "does not depend on spare.weight, spare.bias, " in first["parameters"][0]
    assert "does not depend on blocks.1, " in first["its result"][0]
    assert "reaches the end of its forward pass; " in first["last block"][0]
    assert "does not depend on the inputs of blocks.0, " in first["what is given"][0]
    assert "does not depend on the model, " in first["any of it"][0]


def test_ranks_that_skip_parameters_in_turn_train_the_same_sharded(results):
    of_root, of_root_sharded, of_blocks, of_blocks_sharded = results["unused_when_sharded"][0][
        "in turn"
    ]
    for copies, sharded in ((of_root, of_root_sharded), (of_blocks, of_blocks_sharded)):
        assert copies
        torch.testing.assert_close(
            torch.tensor(sharded), torch.tensor(copies), rtol=0.0, atol=WEIGHTS["fp32"]
        )


def test_a_block_unfrozen_later_is_trained_sharded_and_resumed_with_the_same_bits(results):
    plain, *differing = results["unfreezing_when_sharded"][0]
    assert plain
    assert differing == [plain] * 3


def test_a_block_unfrozen_in_the_training_loop_is_refused_in_that_step(results):
    for lines in results["thawed_in_the_loop"]:
        assert len(lines) == 3
        for line in lines:
            assert "became True in step 2 for blocks.1.norm.weight, blocks.1.norm.bias, " in line


def test_blocks_that_compile_themselves_are_compared_outside_the_compiler(results):
    for losses in results["blocks_with_a_compiler_of_their_own"]:
        assert len(losses) == 2


@pytest.mark.parametrize("who", ["some", "all"])
def test_parameters_without_gradient_on_ranks_train_the_same_sharded(results, who):
    found = results["unused_when_sharded"][0]
    ways = [key for key in found if key.startswith(f"{who} ")]
    assert len(ways) == 4
    for key in ways:
        pair = key.endswith((" accumulated", " adapted"))
        copies, sharded = found[key] if pair else (found[who], found[key])
        assert copies
        torch.testing.assert_close(
            torch.tensor(sharded), torch.tensor(copies), rtol=0.0, atol=WEIGHTS["fp32"]
        )


def test_a_trainer_refuses_invalid_combinations(results):
    for several, made_before in results["refusals"]:
        assert "parallel=single works in one process only" in several
        assert "give a function that makes it" in made_before
