"""A stored config with keys of an earlier version is read, or refused with its line."""

from pathlib import Path

import pytest

from hpcrun.config import Config, ConfigError, changes_since, load_resolved, recorded, to_yaml
from hpcrun.config.removed import REMOVED, without_removed
from hpcrun.config.shape import known_keys

HARMLESS = {"train.uneven": "across", "train.checkpoint_blocks": "7", "job.cluster": "null"}


def stored(folder: Path, **removed: str) -> Path:
    """Return a config of a run with further keys, as an earlier version wrote it."""
    text = to_yaml(Config())
    for key, value in removed.items():
        section, _, name = key.partition(".")
        text = text.replace(f"\n{section}:\n", f"\n{section}:\n  {name}: {value}\n")
    path = folder / "config.yaml"
    path.write_text(text)
    return path


def test_keys_that_ask_for_present_behavior_are_ignored(tmp_path):
    told = []
    path = stored(tmp_path, **HARMLESS)
    assert load_resolved(path, told.append) == Config()
    assert told == [
        f"{path}: ignores keys that an earlier version wrote: train.checkpoint_blocks, job.cluster, "
        "train.uneven"
    ]
    told.clear()
    assert load_resolved(stored(tmp_path), told.append) == Config()
    assert told == []


def test_a_key_that_asks_for_something_else_is_refused(tmp_path):
    path = stored(tmp_path, **HARMLESS, **{"train.float8": "true"})
    with pytest.raises(ConfigError) as refused:
        load_resolved(path)
    (line,) = str(refused.value).splitlines()
    assert line.startswith(f"{path}:")
    assert "train.float8: this version has no true; continue with the version" in line


def test_a_key_with_another_name_today_keeps_its_value(tmp_path):
    text = to_yaml(Config()).replace("\n  comm_hook: none\n", "\n  compression: powersgd\n")
    path = tmp_path / "config.yaml"
    path.write_text(text)
    told = []
    config = load_resolved(path, told.append)
    assert (config.train.comm_hook, config.train.powersgd_rank, told) == ("powersgd", 1, [])
    before = recorded(config)
    before["train"]["compression"] = before["train"].pop("comm_hook")
    found = changes_since(before, Config(), 3)
    assert found is not None
    assert found.refused == ["train.comm_hook: powersgd -> none"]


def test_a_checkpoint_of_an_earlier_version_is_compared():
    before = recorded(Config())
    before["train"] |= {"uneven": "across", "lr": 0.5}
    found = changes_since(before, Config(), 3)
    assert found is not None
    assert found.refused == ["train.lr: 0.5 -> 0.0003"]
    before["train"]["uneven"] = "drop"
    assert without_removed(before)[2] == {"train.uneven": "drop"}


def test_no_key_of_the_schema_counts_as_removed():
    assert REMOVED.keys().isdisjoint(known_keys(Config))
