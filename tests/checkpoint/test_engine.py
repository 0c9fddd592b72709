"""Ranks save and restore together: all ranks learn of an event on one rank."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hpcrun.checkpoint.storage.errors import CheckpointError

from . import single
from .shared_reading import LARGE, content, matrices

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    """Return the results of every scenario of ``ranks.py``: by name, an entry per rank."""
    folder = tmp_path_factory.mktemp("ranks")
    program = [sys.executable, "-m", "tests.checkpoint.ranks", str(folder)]
    ended = subprocess.run(
        program, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False
    )
    assert ended.returncode == 0, ended.stderr
    results = {}
    for world_size in (4, 2):
        ranks = [
            json.loads((folder / f"results-{world_size}-{rank}.json").read_text())
            for rank in range(world_size)
        ]
        results |= {name: [rank[name] for rank in ranks] for name in ranks[0]}
    return results


def agreed(results):
    """Return the answer, which must be the same on all ranks."""
    assert all(result == results[0] for result in results)
    return results[0]


def test_without_a_checkpoint_there_is_nothing_to_restore(played):
    assert agreed(played["nothing_yet"]) is None


def test_all_ranks_learn_of_a_save_and_each_restores_its_own_state(played):
    for rank, (outcomes, names, restored) in enumerate(played["save_prune_restore"]):
        assert [outcome["ok"] for outcome in outcomes] == [True, True, True]
        assert outcomes[2]["path"] == "step-000000003"
        assert outcomes[2]["bytes"] > 4000
        assert names == ["step-000000002", "step-000000003"]
        assert restored == {
            "step": 3,
            "weight": 3.0,
            "own": {"rank": rank, "step": 3},
            "meta": {"step": 3},
            "notes": [],
        }


def test_a_resumed_ddp_training_has_the_bits_of_an_undisturbed_one(played):
    saved, same_bits, names = agreed(played["training"])
    assert saved
    assert same_bits
    assert names == ["0.bias", "0.weight", "2.bias", "2.weight"]


@pytest.mark.parametrize(
    ("scenario", "culprit", "why"),
    [
        ("one_rank_full", "rank 2 (", "No space left on device (ENOSPC); the file needs 1."),
        ("rank_0_cannot_begin", "rank 0 (", "cannot begin a checkpoint: Permission denied"),
        ("rank_0_cannot_commit", "rank 0 (", "cannot be committed: Input/output error"),
    ],
)
def test_an_error_of_one_rank_fails_the_save_on_all_and_the_next_works(
    played, scenario, culprit, why
):
    failed, names, again, newest = agreed(played[scenario])
    assert not failed["ok"]
    assert not failed["fenced"]
    assert failed["error"].startswith(culprit)
    assert why in failed["error"]
    assert names == ["step-000000001"]
    assert again
    assert newest == 2


def test_of_several_failed_ranks_the_first_is_named_and_the_rest_counted(played):
    failed = agreed(played["two_ranks_fail"])
    assert failed["error"].startswith("rank 1 (")
    assert failed["error"].endswith("Input/output error (EIO) (and 1 more)")


def test_a_failed_prune_does_not_fail_the_save(played):
    outcome, names = agreed(played["rank_0_cannot_prune"])
    assert outcome["ok"]
    assert "cannot be pruned" in outcome["notes"][0]
    assert names == ["step-000000001", "step-000000020"]


def test_a_state_or_meta_that_cannot_be_written_fails_the_save_for_all(played):
    ok, error, names = agreed(played["state_that_cannot_be_saved"])
    assert not ok
    assert error.startswith("rank 1 (")
    assert "hook: a builtins.function cannot be saved" in error
    assert names == []
    ok, error, names = agreed(played["meta_that_cannot_be_saved"])
    assert not ok
    assert "meta of step 1 is not plain JSON" in error
    assert names == []


def test_all_ranks_learn_that_they_are_superseded_and_nothing_is_left(played):
    early = agreed(played["fenced_before_it_begins"])
    late, names = agreed(played["fenced_before_the_commit"])
    assert names == []
    for outcome in (early, late):
        assert outcome["fenced"]
        assert not outcome["ok"]
        assert outcome["error"] == "7-1 owns this run now; 7-0 stops writing"


def test_a_defect_on_rank_0_does_not_leave_the_others_waiting(played):
    error = agreed(played["rank_0_stumbles"])
    assert error.startswith("rank 0 (")
    assert error.endswith("): ZeroDivisionError: a defect")


def test_a_save_removes_leftovers_of_dead_attempts_and_a_restore_does_not(played):
    before, after_restore, after_save = agreed(played["the_dead_are_swept"])
    assert before == after_restore == ["step-000000001.tmp-6-0"]
    assert after_save == ["step-000000002"]


def test_damage_that_any_rank_finds_makes_all_fall_back_together(played):
    for rank, restored in enumerate(played["one_rank_s_file_is_damaged"]):
        assert restored["step"] == restored["weight"] == 1
        assert restored["own"] == {"rank": rank, "step": 1}
        first, second = restored["notes"]
        assert first.startswith("step 3 skipped: rank 3 (")
        assert "rank-00003.bin: its content differs from the written content" in first
        assert second.startswith("step 2 skipped: rank 0 (")
    for restored in played["the_manifest_is_damaged"]:
        assert restored["step"] == 1
        assert "manifest.json" in restored["notes"][0]


def test_ranks_do_not_silently_start_over_without_a_valid_checkpoint(played):
    error = agreed(played["all_are_damaged"])["error"]
    assert "no checkpoint is valid: step 2 skipped" in error
    assert "step 1 skipped" in error
    assert "to start from step 0, move the folder away or" in error


def test_a_checkpoint_that_one_node_cannot_read_stays_the_newest(played):
    for rank, (failed, names) in enumerate(played["one_rank_cannot_read"]):
        assert failed["here"] == (rank == 2)
        assert failed["failed"].startswith("step 2: rank 2 (")
        assert (
            "cannot be read: Input/output error (EIO); the checkpoint is kept" in failed["failed"]
        )
        assert "from-scratch" not in failed["failed"]
        assert names == ["step-000000001", "step-000000002"]


def test_damage_that_rank_0_does_not_find_is_a_failure_of_the_rank_s_node(played):
    for rank, (failed, names, newest) in enumerate(played["one_rank_reads_other_bytes"]):
        assert failed["here"] == (rank == 2)
        assert failed["failed"].startswith("step 2: rank 2 (")
        assert "(hash); rank 0 (" in failed["failed"]
        assert "reads the same files without damage; the checkpoint is kept" in failed["failed"]
        # The first save renames damaged checkpoints.
        assert names == ["step-000000001", "step-000000002", "step-000000003"]
        assert newest == 3


def test_code_in_a_checkpoint_is_not_run(played):
    error = agreed(played["code_in_a_checkpoint"])["error"]
    assert "step 2: rank 0 (" in error
    assert "contains more than tensors and plain data, and is not loaded; check who" in error


def test_a_stage_missing_on_some_nodes_is_reported_and_the_save_succeeds(played):
    for rank, (outcome, restored, left) in enumerate(played["a_stage_on_some_nodes"]):
        assert outcome["ok"]
        (note,) = outcome["notes"]
        assert note.startswith("rank 1 (")
        assert "missing: cannot hold the save (checkpoint.stage_dir): No such file" in note
        assert note.endswith("(and 1 more)")
        assert restored["own"] == {"rank": rank, "step": 1}
        assert left == []


def test_fewer_ranks_resume_with_the_shared_state_and_a_note(played):
    for rank, (restored, saved, again) in enumerate(played["fewer_ranks"]):
        assert restored["weight"] == 3.0
        assert restored["own"] is None
        assert restored["notes"] == [
            "step 3 was saved by 4 ranks and is resumed by 2: the ranks' random states are not restored"
        ]
        assert saved["ok"]
        assert again["own"] == {"rank": rank, "step": 9}
        assert again["notes"] == []


def size(values):
    """Return the bytes of the large tensors, whose reads the scenarios count."""
    return sum(value.nbytes for value in values.values() if value.nbytes > LARGE)


@pytest.mark.parametrize(
    ("scenario", "values"), [("replicated_state", content), ("copies_of_shards", matrices)]
)
def test_the_ranks_together_read_each_byte_once(played, scenario, values):
    result = agreed(played[scenario])
    assert result["equal"]
    assert sum(result["read"]) == size(values(result["step"]))
    # Every rank reads a part, so that all of them read at the same time.
    assert min(result["read"]) > 0


def test_rank_0_reads_what_only_the_control_group_can_carry(played):
    result = agreed(played["through_the_control_group"])
    assert result["equal"]
    assert result["read"] == [size(content(1)), 0, 0, 0]


def test_fewer_ranks_read_each_byte_once(played):
    whole, shards = agreed(played["on_fewer_ranks"])
    assert whole["equal"]
    assert shards["equal"]
    assert sum(whole["read"]) == size(matrices(1))


def test_ranks_that_hold_different_tensors_read_for_themselves(played):
    result = agreed(played["ranks_that_hold_different_tensors"])
    assert result["equal"]
    assert result["read"] == [size(content(1))] * 4


def test_damage_that_only_the_reader_sees_makes_all_fall_back(played):
    result = agreed(played["a_tensor_of_one_reader_is_damaged"])
    assert (result["step"], result["equal"]) == (1, True)
    (note,) = result["notes"]
    assert note.startswith("step 2 skipped: rank ")
    assert note.endswith("its content differs from the written content (hash)")


@pytest.mark.parametrize(
    ("scenario", "why"),
    [
        ("one_reader_is_refused", "Input/output error (EIO); the checkpoint is kept"),
        ("one_reader_reads_other_bytes", "reads the same files without damage"),
    ],
)
def test_a_failure_of_the_reader_is_the_same_failure_on_all_ranks(played, scenario, why):
    for rank, result in enumerate(played[scenario]):
        assert result["read failure"]
        assert result["here"] == (rank == 2)
        assert result["error"].startswith("step 1: rank 2 (")
        assert why in result["error"]


def test_one_rank_needs_no_process_group(root):
    engine = single.engine(root, "7-0")
    assert engine.restore(single.nothing) is None
    state = {"weights": torch.arange(5.0)}
    for step in (10, 20, 30):
        outcome = engine.save(step, state, {"n": step}, {"note": "ü"})
        assert outcome.ok
        assert outcome.path == root / f"step-{step:09d}"
        assert outcome.seconds >= outcome.stalled > 0
        files = [*outcome.path.glob("*.bin"), outcome.path / "index.json"]
        assert outcome.bytes == sum(file.stat().st_size for file in files)
    restored = engine.restore(single.nothing, skip=[30])
    assert restored.step == 20
    assert restored.own == {"n": 20}
    assert restored.meta == {"note": "ü"}
    assert torch.equal(restored.shared["weights"], state["weights"])
    assert engine.restore(single.nothing, skip=[20, 30]) is None


def test_saving_a_step_twice_keeps_the_first(root):
    engine = single.engine(root, "7-0")
    assert engine.save(1, {"x": 1}, {}, {}).ok
    assert engine.save(1, {"x": 2}, {}, {}).ok
    assert engine.restore(single.nothing).shared == {"x": 1}


def test_tensors_of_another_shape_are_refused_but_not_damage(tmp_path):
    root = tmp_path / "checkpoints"
    assert single.save(single.engine(root, "7-0"), 1).ok
    with pytest.raises(
        CheckpointError,
        match=r"step 1: rank 0 .*: model/b: \(7,\) in the checkpoint, but \(3,\) here",
    ):
        single.engine(root, "7-1").restore(lambda *_: {"model": {"b": torch.zeros(3)}})


def test_an_error_of_loading_here_is_not_damage(root):
    saving = single.engine(root, "7-0")
    for step in (1, 2):
        assert single.save(saving, step).ok
    with pytest.raises(
        CheckpointError, match=r"step 2: rank 0 .* cannot be loaded here: MemoryError: too much"
    ):
        single.engine(root, "7-1").restore(out_of_memory)
    single.require_state(single.restored(root), 2)


def out_of_memory(entries, skeleton):
    raise MemoryError("too much")
