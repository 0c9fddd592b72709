"""The language model's shape as a ``config.json`` of Hugging Face's Llama, and back; imports no torch.

Keys: ``transformers.LlamaConfig``. The shapes of weights show most mistakes; the keys here change logits too.
"""

import json
from pathlib import Path
from typing import Any

from hpcrun.config.tasks.language_model import VOCABULARY_UNIT, LanguageModelShape
from hpcrun.errors import UserError, one_line

FILE = "config.json"
_SCALED = "llama3"
_KEYS = {
    "num_hidden_layers": "layers",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "hidden_size": "width",
    "intermediate_size": "mlp_width",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied",
    "rope_theta": "rope_base",
    "rope_scaling": "rope_scaling",
}
# What transformers assumes without the key.
_ABSENT: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "rope_theta": 10000.0,
}
_FIXED = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False}


def config_json(shape: LanguageModelShape) -> str:
    """Return the ``config.json`` with which ``LlamaForCausalLM.from_pretrained`` loads exported weights."""
    known = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.rows,
        "max_position_embeddings": shape.context,
        "head_dim": shape.head_width,
        "bos_token_id": None,
        "eos_token_id": shape.document_end,
    }
    text = json.dumps(known | _FIXED | _values(shape), indent=2)
    return f"{text}\n"


def require_same(shape: LanguageModelShape, folder: Path) -> None:
    """Raise UserError if ``folder`` has a ``config.json`` of another model."""
    path = folder / FILE
    if not path.is_file():
        return
    try:
        found: dict[str, Any] = _ABSENT | dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(
            f"train.init_from: {path} cannot be read: {one_line(error)}; copy it again"
        ) from error
    # Since version 5, transformers writes both keys of rotary positions into one.
    rotary = {**(found.get("rope_scaling") or {}), **(found.get("rope_parameters") or {})}
    kind = rotary.pop("rope_type", rotary.pop("type", "default"))
    if kind not in ("default", _SCALED):
        raise UserError(
            f"train.init_from: {path} has rotary positions of the type {kind}; hpcrun has {_SCALED} only"
        )
    found["rope_theta"] = rotary.pop("rope_theta", found["rope_theta"])
    found["rope_scaling"] = {"rope_type": kind, **rotary} if kind == _SCALED else None
    for key, value in _values(shape).items():
        theirs = found.get(key, value)
        if theirs != value:
            if key == "rope_scaling" and theirs:
                theirs = {name: number for name, number in theirs.items() if name != "rope_type"}
            wanted = json.dumps(theirs).replace('"', "")
            raise UserError(
                f"train.init_from: {path} has another {key} than the model; "
                f"set model.{_KEYS[key]}={wanted}"
            )
    tokens = found.get("vocab_size", shape.rows)
    if tokens % VOCABULARY_UNIT:
        raise UserError(
            f"train.init_from: {path} has {tokens} tokens, and the language model multiples of "
            f"{VOCABULARY_UNIT}; save the weights after "
            f"resize_token_embeddings(pad_to_multiple_of={VOCABULARY_UNIT}) of transformers"
        )
    if tokens != shape.rows:
        raise UserError(
            f"train.init_from: {path} has another vocab_size than the model; set model.vocabulary={tokens}"
        )
    for key, only in {**_FIXED, "head_dim": shape.head_width}.items():
        if found.get(key) not in (None, only):
            raise UserError(
                f"train.init_from: {path} has {key}={found[key]}; the language model has {only} only"
            )


def _values(shape: LanguageModelShape) -> dict[str, Any]:
    own = shape.model_dump() | {
        "kv_heads": shape.key_value_heads,
        "mlp_width": shape.inner_width,
    }
    if own["rope_scaling"] is not None:
        own["rope_scaling"] = {"rope_type": _SCALED, **own["rope_scaling"]}
    return {key: own[name] for key, name in _KEYS.items()}
