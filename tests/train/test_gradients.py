"""Two real ranks with bad gradients and with compressed gradients, run by ``gradients.py``."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return the results of both ranks, by scenario."""
    folder = tmp_path_factory.mktemp("gradients")
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.gradients", str(folder)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    ranks = [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]
    both = {scenario: [rank[scenario] for rank in ranks] for scenario in ranks[0]}
    return both | {"said": done.stderr}


@pytest.mark.parametrize("read", ["at once", "late"])
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("bad", ["nan", "overflow", "overflow-fp16"])
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(results, parallel, bad, clip, read):
    name = f"{parallel} {bad} {clip} {read}"
    ranks = [rank[name] for rank in results["bad_gradients"]]
    for rank in ranks:
        assert rank["skipped"] == [True, 1, 5]
        assert rank["kept"], "a weight or a moment moved"
        # The skipped step had the rate 0.009.
        assert rank["rates"] == [0.009, 0.0081, 0.00729]
        assert rank["finite"]
        # The scale overflows at the second of five steps, and grows after three good steps.
        assert rank["scales"] == ([[2, 512.0], [5, 1024.0]] if bad == "overflow-fp16" else [])
    if parallel == "ddp":
        assert ranks[0]["digest"] == ranks[1]["digest"]


def test_a_decision_read_one_step_later_gives_every_rank_the_same_bits(results):
    for rank in results["bad_gradients"]:
        for name, found in rank.items():
            assert found["digest"] == rank[name.replace("late", "at once")]["digest"]


def test_a_nan_loss_on_one_rank_is_distinguished_from_an_overflow(results):
    first, second = results["bad_losses_under_fp16"]
    for (peer, _, _), (kind, text, dumps) in zip(first, second, strict=True):
        assert (peer, kind) == ("PeerFailed", "NotFinite")
        assert text.startswith("gradients are not finite at step 3 (train.nonfinite); the loss of")
        assert dumps == ["step-3.json"]
    assert len(second) == 2


@pytest.mark.parametrize(
    ("kind", "least", "most"),
    [
        ("fp16 fp32", 1e-5, 2e-3),
        ("bf16 fp32", 1e-4, 1e-2),
        ("powersgd fp32", 1e-3, 5e-2),
        ("powersgd fp16", 1e-3, 5e-2),
    ],
)
def test_compressed_gradients_train_nearly_the_same_and_equally_on_all_ranks(
    results, kind, least, most
):
    ranks = [rank[kind] for rank in results["compressed"]]
    assert ranks[0]["digest"] == ranks[1]["digest"]
    for rank, plain in zip(ranks, results["compressed"], strict=True):
        assert least < rank["away"] < most
        assert rank["losses"] == pytest.approx(plain["none fp32"]["losses"], rel=0.1)


def test_powersgd_sends_whole_gradients_until_its_start(results):
    for rank in results["compressed"]:
        ours, plain = rank["powersgd fp32"]["losses"], rank["none fp32"]["losses"]
        # Three steps without compression; the fourth loss is the last that they decide.
        assert ours[:4] == pytest.approx(plain[:4], rel=1e-5)
        assert ours[4] != pytest.approx(plain[4], rel=1e-5)


@pytest.mark.parametrize("amp", ["fp32", "fp16"])
def test_powersgd_resumes_from_a_checkpoint_with_the_same_bits(results, amp):
    for rank in results["powersgd_resumes"]:
        assert rank[amp]["same"]
        assert rank[amp]["notes"] == []
    if amp == "fp16":
        # The loss scale grew before and after the save at step 5, and the error feedback with it.
        assert [steps for steps, _ in rank[amp]["scales"]] == [3, 6, 9]


def test_powersgd_reports_lost_error_feedback(results):
    for rank in results["powersgd_resumes"]:
        (line,) = rank["fp32"]["told"]
        assert line.startswith("PowerSGD's error feedback is not restored")
        assert not rank["fp32"]["otherwise"]


def test_powersgd_drops_the_errors_of_bad_steps_and_of_other_buckets(results):
    ranks = results["powersgd_after_a_bad_step"]
    assert [rank["skipped"] for rank in ranks] == [[1, False]] * 2
    assert ranks[0]["digest"] == ranks[1]["digest"]
    assert results["said"].count("the gradient buckets differ") == 1
