"""Folders that a framework writes: committed or absent, and used only if no byte has changed."""

import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import pytest

from hpcrun import CheckpointError
from hpcrun.integrations.checkpoint_folders import MANIFEST, CheckpointFolders
from hpcrun.ranks.collective import Ranks
from tests.support.kills import killed_at_each_step


def opened(root: Path, *, keep: int | None = None, **facts: Any) -> CheckpointFolders:
    return CheckpointFolders(root, Ranks(), Ranks(), keep=keep, facts=facts)


def write(folder: Path) -> None:
    """Write files as a framework does, also in a folder below and hidden."""
    (folder / "shards").mkdir(parents=True, exist_ok=True)
    (folder / "model.bin").write_bytes(bytes(range(200)))
    (folder / "hpcrun-rank-0.pt").touch()
    (folder / "shards" / ".metadata").write_text("three shards")


def saved(folders: CheckpointFolders, *steps: int, protect: Path | None = None) -> None:
    for step in steps:
        write(folders.prepare(step))
        folders.commit(step, protect)
    folders.wait(must=True)


def names(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


def test_old_checkpoints_go_after_a_commit(tmp_path: Path) -> None:
    folders = opened(tmp_path, keep=2)
    saved(folders, 5, 9, 20, 100, protect=folders.path(5))
    assert names(tmp_path) == {"checkpoint-5", "checkpoint-20", "checkpoint-100", ".lock"}
    assert folders.newest() == 100
    folders.close()


@pytest.mark.parametrize("file", ["model.bin", "shards/.metadata", MANIFEST])
@pytest.mark.parametrize("damage", ["flip", "shorten", "remove"])
def test_damage_falls_back_to_the_checkpoint_before(
    tmp_path: Path, file: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = opened(tmp_path)
    saved(folders, 1, 2)
    path = folders.path(2) / file
    content = path.read_bytes()
    if damage == "flip":
        path.write_bytes(content[:9] + bytes([content[9] ^ 1]) + content[10:])
    elif damage == "shorten":
        path.write_bytes(content[:-3])
    else:
        path.unlink()
    folders.close()
    again = opened(tmp_path)
    assert again.newest() == 1
    said = capsys.readouterr().err
    if (file, damage) != (MANIFEST, "remove"):
        assert f"checkpoint-2 is damaged ({file}: " in said
    assert not folders.path(2).exists()
    again.close()


def test_without_a_valid_checkpoint_training_does_not_begin_anew(tmp_path: Path) -> None:
    folders = opened(tmp_path)
    saved(folders, 3)
    (folders.path(3) / "model.bin").unlink()
    with pytest.raises(CheckpointError, match="no checkpoint is valid"):
        folders.newest()
    folders.close()


def test_a_training_with_other_facts_is_refused(tmp_path: Path) -> None:
    folders = opened(tmp_path, batch=4)
    saved(folders, 3)
    folders.close()
    with pytest.raises(CheckpointError, match="batch was 4, and is 8 now"):
        opened(tmp_path, batch=8).newest()


def test_an_interrupted_save_leaves_nothing(tmp_path: Path) -> None:
    folders = opened(tmp_path)
    saved(folders, 1)
    write(folders.prepare(2))
    folders.close()
    again = opened(tmp_path)
    assert names(tmp_path) == {"checkpoint-1", ".lock"}
    assert again.newest() == 1
    again.close()


def test_a_kill_in_a_removal_leaves_a_checkpoint_or_nothing(tmp_path: Path) -> None:
    def remove() -> None:
        saved(opened(tmp_path, keep=2), 3)

    for place in killed_at_each_step(remove):
        again = opened(tmp_path, keep=2)
        saved(again, *{1, 2} - {int(path.name[11:]) for path in tmp_path.glob("checkpoint-*")})
        assert again.newest() in (2, 3), place
        assert names(tmp_path) <= {"checkpoint-1", "checkpoint-2", "checkpoint-3", ".lock"}, place
        again.close()


def test_a_checkpoint_of_another_program_is_refused_untouched(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-7").mkdir()
    (tmp_path / "checkpoint-7" / "model.bin").touch()
    with pytest.raises(CheckpointError, match="checkpoint-7: is a checkpoint of another program"):
        opened(tmp_path)
    assert (tmp_path / "checkpoint-7" / "model.bin").exists()


def test_a_failed_commit_is_reported_and_training_continues(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = opened(tmp_path)
    saved(folders, 1)
    for _ in range(2):
        write(folders.prepare(2))
        shutil.rmtree(folders.path(2))
        folders.commit(2, None)
    assert "step 2 was not saved: " in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="step 2 was not saved"):
        folders.close()
    assert opened(tmp_path).newest() == 1


def test_two_programs_do_not_save_into_one_folder(tmp_path: Path) -> None:
    folders = opened(tmp_path)
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()

    def other() -> None:
        try:
            opened(tmp_path)
        except CheckpointError as error:
            answers.put(str(error))

    process = context.Process(target=other)
    process.start()
    process.join()
    assert "saves there; use another folder, or end that training" in answers.get()
    folders.close()
