"""Sections have the values and errors of pydantic's models, without pydantic."""

import copy
import pickle
from typing import Any

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from hpcrun.config import Config, ModelOptions
from hpcrun.config.fields import Count, RunName
from hpcrun.config.schema import Job
from hpcrun.config.section import Section, field
from hpcrun.config.shape import known_keys
from hpcrun.tasks import OPTIONS, options_for

VALUES: list[Any] = [
    *(None, True, 0, 1, -1, 10**13, 2**70, 0.5, 1.0, 1.5, float("nan"), float("inf")),
    *("", "x", "5", "1e3", "true", "auto", "a b", "a\0b", "10-15", "1:30", "64G", "--array=1", "\udcff"),
    *([], [1], ["a"], ["a", 1], [0.1, 0.2], [0.1, 1.0], [0.1], ["--x"], ["finished"]),
    *({}, {"A": "b"}, {"A": 1}, {1: "b"}, {"a b": "c"}, b"x"),
]  # fmt: skip


def answer(kind: Any, values: dict[str, Any]) -> Any:
    try:
        return repr([dict(kind.model_validate(values))[name] for name in values])
    except ValidationError as error:
        return [(it["type"], it["loc"], it["msg"]) for it in error.errors()]


SECTIONS = [
    *(Config, *(type(part) for _, part in Config() if isinstance(part, Section))),
    *(kind for task in OPTIONS for kind in options_for(task) or ()),
]


@pytest.mark.parametrize("section", SECTIONS)
def test_a_section_answers_as_a_model_of_pydantic(section: type[Section]) -> None:
    fields: dict[str, Any] = {
        name: (key.annotation, Field(default=key.default))
        for name, key in section.model_fields.items()
        if not isinstance(key.default, Section)
    }
    extra = ConfigDict(extra=section.model_config["extra"])
    model = create_model("Model", __config__=extra, **fields)
    for name in (*fields, "zzz"):
        for value in VALUES:
            assert answer(section, {name: value}) == answer(model, {name: value}), (name, value)


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


def test_a_subclass_has_the_keys_of_its_base_first() -> None:
    class Base(Section):
        first: Count = field(default=1, description="First.")

    class More(Base):
        second: Count = field(description="Second.")

    assert list(known_keys(More)) == ["first", "second"]
    assert dict(More(second=3)) == {"first": 1, "second": 3}
    with pytest.raises(ValidationError, match="Field required"):
        More.model_validate({})


def test_a_users_model_may_have_a_section_as_a_key() -> None:
    class Options(BaseModel):
        job: Job = Job()

    assert Options.model_validate({"job": {"nodes": 2}}).job.nodes == 2
    with pytest.raises(ValidationError, match="greater than or equal to 1"):
        Options.model_validate({"job": {"nodes": 0}})


def test_a_key_of_the_task_as_an_attribute_is_refused_with_the_remedy() -> None:
    model: Any = ModelOptions.model_validate({"width": 3})
    with pytest.raises(AttributeError, match=r"own\['width'\]"):
        _ = model.width
    assert not hasattr(model, "depth")
