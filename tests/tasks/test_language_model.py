"""The task as the training loop uses it, on text that is learned within a minute."""

import json
import math
import random
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F
from torch.utils.data import default_collate

from examples.bdh import BDH, BDHShape, BDHTask
from hpcrun.config import Config, file_layer, locate, resolve, with_task_options
from hpcrun.config.tasks import options_for
from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.errors import UserError
from hpcrun.tasks.language_model import LanguageModel, printable
from hpcrun.tasks.llama import Llama

CONFIGS = Path(__file__).parents[2] / "configs"
SMALL = {"layers": 1, "heads": 2, "width": 32, "context": 32}


def task(packed: Path, **model: object) -> LanguageModel:
    values = {"seed": 3, "model": {**SMALL, **model}, "data": {"path": str(packed)}}
    return LanguageModel(Config.model_validate(values))


def read_config(name: str) -> Config:
    layers = [file_layer(CONFIGS / name)]
    return with_task_options(resolve(layers), options_for("language-model"), locate(layers))


@pytest.mark.parametrize(
    ("kind", "model_keys"),
    [
        (LanguageModel, {"layers": 1, "heads": 2, "width": 64, "context": 64}),
        (BDHTask, {"layers": 2, "heads": 4, "width": 32, "context": 64, "neurons": 256}),
    ],
)
def test_training_on_the_library_beats_the_unigram_entropy(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: type[LanguageModel],
    model_keys: dict[str, object],
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    learner = kind(Config.model_validate({"model": model_keys, "data": {"max_bytes": 2_000_000}}))
    learner.prepare()
    model, train = learner.build_model(), learner.train_dataset()
    validation = learner.validation_dataset()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    draw = random.Random(0)
    for _ in range(120):
        batch = default_collate([train[draw.randrange(len(train))] for _ in range(16)])
        optimizer.zero_grad()
        learner.loss(model, batch).backward()
        optimizer.step()
    with torch.no_grad():
        held_out = default_collate([validation[i] for i in range(min(200, len(validation)))])
        loss = learner.loss(model, held_out).item()
    report = learner.report(model, loss)
    assert report["validation_loss"] < report["unigram_entropy"] - 0.3


def test_the_loss_asks_for_the_next_byte_at_every_position(packed):
    learner = task(packed)
    model, sample = learner.build_model().eval(), learner.train_dataset()[0]
    logits = model(sample[None, :-1].long())[0]
    expected = -F.log_softmax(logits, -1)[range(32), sample[1:].long()].mean()
    torch.testing.assert_close(learner.loss(model, sample[None]), expected)


@pytest.mark.parametrize(
    "model",
    [
        Llama(LanguageModelShape(layers=2, heads=2, width=32, context=12)),
        BDH(BDHShape(layers=2, heads=2, width=16, context=12, neurons=64), seed=0),
    ],
    ids=["llama", "bdh"],
)
def test_a_later_byte_never_changes_an_earlier_prediction(model: torch.nn.Module):
    seen = torch.randint(0, 256, (3, 12), generator=torch.Generator().manual_seed(1))
    other = seen.clone()
    other[:, 7] = (other[:, 7] + 1) % 256
    before, after = model.eval()(seen), model(other)
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_the_report_is_plain_data_and_keeps_the_random_state(packed):
    learner = task(packed)
    model = learner.build_model()
    before = torch.get_rng_state()
    report, again = learner.report(model, 1.5), learner.report(model, 1.5)
    assert torch.equal(torch.get_rng_state(), before)
    assert json.loads(json.dumps(report)) == report == again
    assert report["bits_per_byte"] == pytest.approx(1.5 / math.log(2))
    assert report["sample"].startswith("def ")


def test_what_the_model_writes_cannot_steer_a_terminal():
    assert printable(b"a\x1b[31m\n\tb\r\x00\xff\xc3\xa9") == "a�[31m\n\tb���é"


def test_a_rank_without_the_corpus_fails_before_it_trains(tmp_path: Path):
    config = {"model": SMALL, "data": {"path": str(tmp_path / "absent")}}
    with pytest.raises(
        UserError, match=r"absent/train.bin: cannot be read: .* that every node can read"
    ):
        LanguageModel(Config.model_validate(config)).train_dataset()


@pytest.mark.parametrize("name", ["quickstart.yaml", "gpt.yaml"])
def test_a_shipped_config_asks_for_two_nodes_of_four(name: str):
    config = read_config(name)
    assert (config.job.nodes, config.job.gpus) == (2, 4)
    assert options_for(config.task) is not None


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("quickstart.yaml", (0.40, 0.44)),
        ("llama-tiny.yaml", (0.40, 0.43)),
        ("gpt.yaml", (84, 86)),
        ("tokens.yaml", (123, 124)),
        ("llama-1b.yaml", (1235, 1237)),
        ("llama-8b.yaml", (8030, 8031)),
    ],
)
def test_a_shipped_config_has_about_the_parameters_its_comment_says(
    name: str, millions: tuple[float, float]
):
    with torch.device("meta"):
        model = LanguageModel(read_config(name)).build_model()
    assert millions[0] < sum(p.numel() for p in model.parameters()) / 1e6 < millions[1]
