"""The end of runs in which ranks wait in different collectives, or in none."""

import re

import pytest

from hpcrun.run.io.files import read_json
from tests.train.forks import run_program


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return run_program("tests.train.crossed", tmp_path_factory.mktemp("crossed"))


@pytest.mark.parametrize(
    ("name", "cause", "reason"),
    [
        (
            "parameter",
            "crash",
            r"rank [01] on local0 was killed by SIGABRT: Received data size doesn't match expected size: "
            r"ranks came to different collectives; .*; under fsdp run the same blocks on "
            r"all ranks; .* \(1 other ",
        ),
        (
            "block",
            "hang",
            r"no progress for .* in step 3: rank 0 on \S+ came to all_gather of \d+ at \S+ in _backward; "
            r"rank 1 on \S+ came to \S+ of \d+ at \S+ in _backward; these never meet; ",
        ),
        (
            "at-once",
            "bad-input",
            r"train.parallel: under fsdp the ranks gather weights .* but rank 0 reaches blocks.1 while "
            r"rank 1 \(\S+\) reaches the end of its forward pass; ",
        ),
        (
            "building",
            "hang",
            r"no progress for .* before the first step: rank 1 on \S+ is behind, building the model and its "
            r"data at crossed.py:\d+ in compare_position; ",
        ),
        # This rank has begun nothing in the group in which the other ranks compare.
        (
            "first-pass",
            "hang",
            r"no progress for .* in step 0: rank 1 on \S+ is behind, training at crossed.py:\d+ in comp\w+",
        ),
        # The collectives wait for the watchdog.
        (
            "first-step",
            "hang",
            r"no progress for .* in step 0: rank 1 on \S+ is behind, training at crossed.py:\d+ in comp\w+",
        ),
        (
            "validating",
            "hang",
            r"no progress for .* in step 0: rank 1 on \S+ is behind, validating at crossed.py:\d+ in comp\w+",
        ),
        (
            "copies",
            "crash",
            r"rank 1 on \S+: RuntimeError: Expected to have finished reduction in the prior iteration: "
            r".* set train.find_unused_parameters=true; otherwise remove them from the model \(1 other rank ",
        ),
    ],
)
def test_the_first_cause_is_reported_with_a_remedy(folder, name, cause, reason):
    result = read_json(folder / name / "result.json")
    assert (result["state"], result["cause"]) == ("failed", cause)
    assert re.match(reason, result["reason"]), result["reason"]


@pytest.mark.parametrize(
    ("name", "rank", "work"),
    [
        ("importing", 1, "importing the task"),
        ("preparing", 0, "preparing the data"),
        ("wrapping", 1, "wrapping the model"),
        ("restoring", 1, "restoring"),
        ("reporting", 0, "making the report"),
    ],
)
def test_a_rank_that_hangs_before_the_steps_or_after_them_is_named_with_its_work(
    folder, name, rank, work
):
    result = read_json(folder / name / "result.json")
    assert (result["state"], result["cause"]) == ("failed", "hang")
    assert f": rank {rank} on " in result["reason"]
    assert f" is behind, {work} at crossed.py:" in result["reason"]
