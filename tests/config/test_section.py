"""Copies of a config are equal to it and immutable."""

import copy
import pickle
from typing import Any

import pytest
from pydantic import ValidationError

from hpcrun.config import Config, ModelOptions


@pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, lambda it: pickle.loads(pickle.dumps(it))]
)
def test_a_copy_is_equal_and_immutable(copied: Any) -> None:
    config = Config.model_validate({"model": {"self": 1, "a b": [2]}, "job": {"setup": ["x"]}})
    again = copied(config)
    assert again == config
    assert again.model.own == {"self": 1, "a b": [2]}
    assert again.model_dump_json() == config.model_dump_json()
    with pytest.raises(ValidationError, match="frozen"):
        del again.seed
    assert config != Config()
    assert ModelOptions(layers=2) != ModelOptions(layers=3)
    assert hash(config.checkpoint) == hash(again.checkpoint)
