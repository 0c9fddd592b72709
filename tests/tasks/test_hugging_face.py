"""Weights of transformers' Llama come in and go back, with the config.json that describes them."""

import json
import re

import pytest
import torch

from hpcrun import Config
from hpcrun.checkpoint.state.capture import alike, capture_shared
from hpcrun.cli.main import guarded
from hpcrun.config.tasks.hugging_face import FILE, config_json, require_same
from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.errors import UserError
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.run import directory
from hpcrun.tasks.language_model import LanguageModel
from hpcrun.train.model.initial_weights import load_initial_weights
from hpcrun.train.setup import make_model
from tests.checkpoint.single_rank import engine

SCALING = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
KEYS = {
    "layers": 2, "heads": 4, "kv_heads": 2, "width": 64, "mlp_width": 80, "vocabulary": 384, "context": 48,
    "rope_base": 100.0, "norm_eps": 1e-6, "document_end": 3,
}  # fmt: skip


def shape_of(**keys) -> LanguageModelShape:
    return LanguageModelShape.model_validate(KEYS | keys)


def theirs_of(shape: LanguageModelShape, **changes):
    transformers = pytest.importorskip("transformers")
    described = json.loads(config_json(shape)) | changes
    torch.manual_seed(1)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig.from_dict(described)).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.2)
    return model


@pytest.mark.parametrize(("kv_heads", "scaling"), [(2, None), (1, None), (4, SCALING)])
@pytest.mark.parametrize("tied", [True, False])
def test_an_exported_run_loads_in_transformers_with_equal_logits(
    tied, kv_heads, scaling, tmp_path, monkeypatch
):
    keys = KEYS | {"tied": tied, "kv_heads": kv_heads, "rope_scaling": scaling}
    shape = LanguageModelShape.model_validate(keys)
    theirs = theirs_of(shape)
    theirs.save_pretrained(tmp_path / "theirs")
    config = {
        "task": "language-model",
        "train": {"init_from": str(tmp_path / "theirs")},
        "model": keys,
        "data": {"tokens": ["t.bin"]},
    }
    ours = LanguageModel(Config.model_validate(config)).build_model()
    load_initial_weights(ours, str(tmp_path / "theirs"))
    run = directory.create(tmp_path / "runs" / "r", json.dumps(config), {})
    optimizer = torch.optim.SGD(ours.parameters())
    shared = capture_shared(ours, optimizer, extra={})
    assert engine(run.checkpoints, "7-0").save(1, shared, {}, {}, alike(ours)).ok
    monkeypatch.chdir(tmp_path)
    assert guarded(["export", "r", "out", "--format", "safetensors"]) == 0
    back = type(theirs).from_pretrained(tmp_path / "out").eval()
    seen = torch.randint(0, 384, (2, 48), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = theirs(seen).logits
        torch.testing.assert_close(ours(seen), expected)
        torch.testing.assert_close(back(seen).logits, expected)
    if scaling is not None:
        unscaled = theirs_of(shape, rope_scaling=None)
        assert (unscaled(seen).logits - expected).abs().max() > 0.1
    assert back.state_dict().keys() == theirs.state_dict().keys()
    require_same(shape, tmp_path / "out")


# The spelling of transformers 5, and that of version 4 and of the folders on Hugging Face.
@pytest.mark.parametrize("merged", [True, False])
def test_both_spellings_of_rotary_positions_are_read(merged, tmp_path):
    shape = shape_of(rope_scaling=SCALING)
    described = json.loads(config_json(shape))
    if merged:
        base = described.pop("rope_theta")
        described["rope_parameters"] = {**described.pop("rope_scaling"), "rope_theta": base}
    (tmp_path / FILE).write_text(json.dumps(described))
    require_same(shape, tmp_path)
    with pytest.raises(UserError, match=r"set model.rope_scaling={factor: 8.0, low_freq_factor: 1"):
        require_same(shape_of(), tmp_path)


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        (
            {"rope_theta": 5e5},
            "has another rope_theta than the model; set model.rope_base=500000.0",
        ),
        ({"num_attention_heads": 8}, "set model.heads=8"),
        ({"rms_norm_eps": 1e-5}, "set model.norm_eps=1e-05"),
        ({"tie_word_embeddings": False}, "set model.tied=false"),
        (
            {"rope_scaling": {"type": "yarn"}},
            "rotary positions of the type yarn; hpcrun has llama3",
        ),
        ({"hidden_act": "gelu"}, "has hidden_act=gelu; the language model has silu only"),
        ({"head_dim": 32}, "has head_dim=32; the language model has 16 only"),
    ],
)
def test_weights_of_another_model_are_refused_in_a_line(changed, line, tmp_path):
    described = json.loads(config_json(shape_of())) | changed
    (tmp_path / FILE).write_text(json.dumps(described))
    config = {"train": {"init_from": str(tmp_path)}, "model": KEYS, "data": {"tokens": ["t.bin"]}}
    task, place = LanguageModel(Config.model_validate(config)), DistributedConfig()
    with pytest.raises(UserError) as refused:
        make_model(task, task.config, place, Ranks())
    assert make_model(task, task.config, place, Ranks(), resumes=True)[0]
    assert line in str(refused.value)
    assert str(tmp_path / FILE) in str(refused.value)


def test_an_unreadable_description_is_named(tmp_path):
    (tmp_path / FILE).write_text("{")
    with pytest.raises(UserError, match=r"cannot be read: .*; copy it again"):
        require_same(shape_of(), tmp_path)
    (tmp_path / FILE).unlink()
    require_same(shape_of(), tmp_path)


def test_a_submission_refuses_weights_of_another_model(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / FILE).write_text(config_json(shape_of(vocabulary=256, document_end=None)))
    words = [f"model.{key}={KEYS[key]}" for key in ("layers", "heads", "kv_heads", "width")]
    words += ["model.mlp_width=80", "model.norm_eps=1e-6", "train.init_from=.", "--cpu"]
    assert guarded(["submit", "--executor", "local", "--runs-dir", "runs", *words]) == 2
    line = "train.init_from: config.json has another rope_theta than the model; set model.rope_base=100.0"
    assert line in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("tokens", "line"),
    [(32001, "resize_token_embeddings(pad_to_multiple_of=128)"), (512, "set model.vocabulary=512")],
)
def test_weights_with_another_vocabulary_are_refused(tmp_path, tokens, line):
    content = json.loads(config_json(shape_of())) | {"vocab_size": tokens}
    (tmp_path / FILE).write_text(json.dumps(content))
    with pytest.raises(UserError, match=re.escape(line)):
        require_same(shape_of(), tmp_path)
