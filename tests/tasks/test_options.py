"""An error in the task's own keys is answered with its place and the remedy."""

from pathlib import Path

import pytest

from hpcrun.config import ConfigError, locate, override_layer, resolve, with_task_options
from hpcrun.config.tasks import options_for


def checked(*overrides: str):
    layers = [override_layer(list(overrides))]
    return with_task_options(resolve(layers), options_for("language-model"), locate(layers))


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("model.widht=64", "model.widht: unknown key; did you mean model.width?"),
        ("model.width=130", "nearest: 128 or 136"),
        ("model.width=1", "nearest: 8"),
        ("model.heads=0", "model.heads: should be at least 1, not 0"),
        ("model.dropout=1", "model.dropout: should be less than 1, not 1"),
        ("data.max_byte=5", "did you mean data.max_bytes?"),
        ("data.validation_fraction=0", "data.validation_fraction: should be"),
        ("data.path=''", "data.path: is empty; omit the key, or write null"),
        (
            "model.kv_heads=3",
            "model.kv_heads: should divide model.heads = 4, unlike 3: use 1 or 2 or 4",
        ),
        ("model.document_end=256", "model.document_end: is 256, outside model.vocabulary = 256"),
        ("data.validation_tokens=[a]", "data.validation_tokens: needs data.tokens"),
        ("data.tokens=['']", "data.tokens: is empty"),
    ],
)
def test_a_bad_option_is_refused_with_its_place(override: str, line: str):
    with pytest.raises(ConfigError) as caught:
        checked(override)
    assert line in str(caught.value)
    assert str(caught.value).startswith("command line: ")
    assert "\n" not in str(caught.value)


def test_defaults_are_written_to_the_run_directory():
    config = checked("model.layers=3")
    chosen = {name: config.model.own[name] for name in ("layers", "heads", "kv_heads", "tied")}
    assert chosen == {"layers": 3, "heads": 4, "kv_heads": None, "tied": True}
    assert config.data.own["path"] is None


def test_a_relative_path_is_settled_where_it_was_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    data = checked("data.path=corpus", "data.tokens=[a.bin]", "data.validation_tokens=[b.bin]").data
    assert data.own["path"] == str(tmp_path / "corpus")
    assert data.own["tokens"] == [str(tmp_path / "a.bin")]
    assert data.own["validation_tokens"] == [str(tmp_path / "b.bin")]
