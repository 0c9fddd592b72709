"""Sections are immutable models with independent copies and defaults."""

import copy
import pickle
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from hpcrun.config import Config, ModelOptions
from hpcrun.config.fields import Count, RunName


def test_a_section_has_no_shared_default_and_no_attribute_of_the_class() -> None:
    for made in (Config(), Config.model_construct()):
        made.job.setup.append("module load cuda")
    assert Config().job.setup == Config.model_construct().job.setup == []
    assert not hasattr(Config, "seed")


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
    assert hash(config.train) == hash(again.train)


def test_a_model_of_a_user_may_use_the_types_of_the_config() -> None:
    class Options(BaseModel):
        name: RunName
        size: Count = 1

    assert Options(name="größe", size=2).size == 2
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Options(name="x", size=0)
    assert Options.model_json_schema()["properties"]["size"]["minimum"] == 1
