"""A site's profile is the lowest layer."""

from pathlib import Path

import pytest

from hpcrun.config import ConfigError
from hpcrun.config.site import profile_layer, profile_path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "hpcrun"
    folder.mkdir()
    return folder


def environment(folder: Path, **more: str) -> dict[str, str]:
    return {"XDG_CONFIG_HOME": str(folder.parent), **more}


def test_only_the_default_applies_without_a_choice(folder: Path) -> None:
    (folder / "juwels.yaml").write_text("job: {account: abc}\n")
    assert profile_path(environment(folder)) is None
    (folder / "default.yaml").write_text("")
    assert profile_path(environment(folder)) == folder / "default.yaml"


def test_a_flag_overrides_the_variable_with_a_name_or_path(folder: Path) -> None:
    (folder / "a.yaml").write_text("")
    (folder / "b.yaml").write_text("")
    environ = environment(folder, HPCRUN_PROFILE="a")
    assert profile_path(environ) == folder / "a.yaml"
    assert profile_path(environ, "b") == folder / "b.yaml"
    assert profile_path(environ, str(folder / "b.yaml")) == folder / "b.yaml"
    assert profile_path(environ, "") is None


def test_a_missing_profile_is_refused_with_the_available_profiles(folder: Path) -> None:
    for name in ("a", "hosts"):
        (folder / f"{name}.yaml").write_text("")
    with pytest.raises(ConfigError, match=r"\$HPCRUN_PROFILE: no profile .*c\.yaml; available: a$"):
        profile_path(environment(folder, HPCRUN_PROFILE="c"))


def test_a_profile_may_not_change_what_is_trained(folder: Path) -> None:
    (folder / "a.yaml").write_text("job: {account: abc}\ntrain:\n  lr: 1.0\n")
    with pytest.raises(ConfigError, match=r"a\.yaml:2: train: a profile says where to run"):
        profile_layer(folder / "a.yaml")
