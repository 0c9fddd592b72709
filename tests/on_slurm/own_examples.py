"""Examples of nanoGPT, Lightning, Accelerate and transformers, with the changes that make them exact.

This repository does not contain the examples. A test reads them from checkouts in one folder.
"""

from __future__ import annotations

import os
import pickle
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

Changes = tuple[tuple[str, str], ...]
"""Pairs of an old and a new text; the program has the old text once."""


@dataclass(frozen=True)
class Example:
    """A program and its changes.

    ``files``: the program, and the files that it reads, in the folder of the checkouts. ``exact``: the
    changes for an exact resume, with a call of ``at`` after each step. ``small``: the changes for a short
    training on two CPUs. ``data``: writes data into the working folder. ``hub``: replaces downloads.
    """

    files: tuple[str, ...]
    exact: Changes
    small: Changes = ()
    arguments: tuple[str, ...] = ()
    data: Callable[[Path], object] | None = None
    hub: Callable[[], object] | None = None


def prepare(example: Example, checkouts: Path, folder: Path) -> None:
    """Copy the files of ``example`` into ``folder``, and write its data."""
    for file in example.files:
        (folder / Path(file).name).write_text((checkouts / file).read_text())
    if example.data:
        example.data(folder)


def run(example: Example, at: Any) -> None:
    """Run ``example`` in the folder that ``prepare`` was given; ``at.model`` is then its model."""
    program = Path(example.files[0]).name
    text = Path(program).read_text()
    for old, new in (*example.exact, *example.small):
        if text.count(old) != 1:
            raise ValueError(f"{program}: {text.count(old)} times {old!r}")
        text = text.replace(old, new)
    if example.hub:
        example.hub()
    sys.path.insert(0, str(Path.cwd()))
    sys.argv = [program, *example.arguments]
    # With the postponed annotations of this file, transformers' parser would not find the types.
    code = compile(text, program, "exec", dont_inherit=True)
    exec(code, {"__name__": "__main__", "at": at})


def _tokens(folder: Path) -> None:
    data = folder / "data" / "toy"
    data.mkdir(parents=True)
    tokens = np.random.default_rng(1).integers(64, size=5000, dtype=np.uint16)
    for split in ("train", "val"):
        tokens.tofile(data / f"{split}.bin")
    (data / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 64}))


NANOGPT = Example(
    ("nanoGPT/train.py", "nanoGPT/model.py", "nanoGPT/configurator.py"),
    exact=(
        ("import os\n", "import os\nimport hpcrun\n"),
        (
            "X, Y = get_batch('train') #",
            "state = hpcrun.resumable(model=model, optimizer=optimizer, scaler=scaler, every=3)\n"
            "at.model = raw_model = model.module\n"
            "iter_num = state.steps\n"
            "X, Y = state.kept or get_batch('train') #",
        ),
        (
            "    if iter_num > max_iters:\n        break\n",
            "    if iter_num > max_iters:\n        break\n"
            "    at(iter_num)\n    state.step(keep=(X, Y))\nstate.close()\n",
        ),
    ),
    small=(
        ("device = f'cuda:{ddp_local_rank}'", "device = 'cpu'"),
        ("torch.cuda.set_device(device)", "pass"),
        (", device_ids=[ddp_local_rank]", ""),
        ("out_dir = 'out'", "out_dir = str(at.output / 'out')"),
    ),
    arguments=(
        *("--backend=gloo", "--device=cpu", "--dtype=float32", "--compile=False"),
        *("--dataset=toy", "--n_layer=2", "--n_head=2", "--n_embd=16", "--block_size=16"),
        *("--batch_size=4", "--dropout=0.1", "--gradient_accumulation_steps=4"),
        *("--max_iters=15", "--lr_decay_iters=15", "--warmup_iters=3"),
        *("--eval_interval=4", "--eval_iters=2"),
    ),
    data=_tokens,
)

_LIGHTNING = (
    "import torch\n",
    "from hpcrun.integrations.lightning import ExactResume\n"
    "from tests.integrations.lightning_programs import Batches\n"
    "import torch\n",
)
_TRAINER = (
    "callbacks=[Batches(at), ExactResume(every=3)], accelerator='cpu', devices=1, num_nodes=2, "
    "max_epochs=3, logger=False, enable_checkpointing=False, limit_val_batches=2, limit_test_batches=2"
)


def _text(folder: Path) -> None:
    # 4000 samples of 35 words are for validation and test, and 240 for training.
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text(f"{_sentence(34)}\n" * 4241)


LIGHTNING_TRANSFORMER = Example(
    ("pytorch-lightning/examples/pytorch/basics/transformer.py",),
    exact=(
        _LIGHTNING,
        (
            "L.Trainer(gradient_clip_val=0.25, max_epochs=20)",
            f"L.Trainer(gradient_clip_val=0.25, {_TRAINER})\n    at.model = model",
        ),
    ),
    data=_text,
)


def _images(folder: Path) -> None:
    data = folder / "data" / "MNIST" / "complete"
    data.mkdir(parents=True)
    images = torch.randint(256, (400, 28, 28), dtype=torch.uint8)
    for name in ("training.pt", "test.pt"):
        torch.save((images, torch.zeros(400)), data / name)


def _use_written_images() -> None:
    os.environ["PL_USE_MOCKED_MNIST"] = "1"


LIGHTNING_GAN = Example(
    ("pytorch-lightning/examples/pytorch/domain_templates/generative_adversarial_net.py",),
    exact=(
        _LIGHTNING,
        (
            'Trainer(accelerator="gpu", devices=1)',
            f"Trainer({_TRAINER}, strategy='ddp_find_unused_parameters_true')\n    at.model = model",
        ),
        # Without a seed, no two trainings have the same weights.
        ("    model = GAN(", "    torch.manual_seed(1)\n    model = GAN("),
    ),
    small=(
        ("MNISTDataModule()", "MNISTDataModule(num_workers=1, val_split=16)"),
        ("torchvision.utils.make_grid(sample_imgs)", "sample_imgs"),
    ),
    data=_images,
    hub=_use_written_images,
)


def _sentence(words: int, seed: int = 1) -> str:
    numbers = random.Random(seed)
    return " ".join(f"word{numbers.randrange(20)}" for _ in range(words))


def _tokenizer() -> Any:
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[PAD]": 0, "[UNK]": 1} | {f"word{number}": number + 2 for number in range(20)}
    plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="[PAD]")


def _replace_hub() -> None:
    """Replace the downloads of Accelerate's example: a small model, a tokenizer and sentences."""
    import datasets
    import evaluate
    import transformers

    tokenizer = _tokenizer()
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.BertConfig(vocab_size=22, intermediate_size=16, **sizes)
    bert = transformers.BertForSequenceClassification

    def rows(count: int) -> Any:
        pairs = {
            f"sentence{one}": [_sentence(5, 2 * i + one) for i in range(count)] for one in (1, 2)
        }
        return datasets.Dataset.from_dict(
            {**pairs, "label": [i % 2 for i in range(count)], "idx": [*range(count)]}
        )

    datasets.load_dataset = lambda *_: datasets.DatasetDict(train=rows(380), validation=rows(40))
    evaluate.load = lambda *_: SimpleNamespace(add_batch=lambda **_: None, compute=lambda: None)
    transformers.AutoTokenizer.from_pretrained = lambda *_, **__: tokenizer
    transformers.AutoModelForSequenceClassification.from_pretrained = lambda *_, **__: bert(config)


ACCELERATE = Example(
    ("accelerate/examples/by_feature/gradient_accumulation.py",),
    exact=(
        (
            "    for epoch in range(num_epochs):\n",
            "    from hpcrun.integrations.accelerate import exact_resume\n"
            "    state = exact_resume(accelerator, every=3)\n"
            "    at.model = accelerator.unwrap_model(model)\n"
            "    for epoch in state.epochs(num_epochs):\n",
        ),
        ("enumerate(train_dataloader)", "enumerate(state.batches(train_dataloader))"),
        (
            "                optimizer.zero_grad()\n",
            "                optimizer.zero_grad()\n"
            "            if accelerator.sync_gradients:\n"
            "                at(state.steps + 1)\n"
            "            state.step()\n",
        ),
    ),
    arguments=("--cpu", "--gradient_accumulation_steps=2"),
    hub=_replace_hub,
)


def _tokenizer_and_text(folder: Path) -> None:
    _tokenizer().save_pretrained(folder / "tokenizer")
    (folder / "text.txt").write_text("".join(f"{_sentence(34, i)}\n" for i in range(200)))


def _stay_offline() -> None:
    """Keep datasets in the working folder, and replace the metric, which evaluate downloads."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(Path("cache").absolute())}
    import evaluate

    def accuracy(predictions: Any, references: Any) -> dict[str, float]:
        return {"accuracy": float((predictions == references).mean())}

    evaluate.load = lambda *_, **__: SimpleNamespace(compute=accuracy)


TRANSFORMERS_CLM = Example(
    ("transformers/examples/pytorch/language-modeling/run_clm.py",),
    exact=(
        (
            "logger = logging.getLogger(__name__)\n",
            "from hpcrun.integrations.transformers import ExactResume\n"
            "logger = logging.getLogger(__name__)\n"
            "class Steps(transformers.TrainerCallback):\n"
            "    def on_step_end(self, args, state, control, **_):\n"
            "        at(state.global_step)\n",
        ),
        (
            "    trainer = Trainer(\n",
            "    at.model = model\n    trainer = Trainer(\n        callbacks=[ExactResume(), Steps()],\n",
        ),
    ),
    small=(("    # Setup logging\n", "    training_args.output_dir = str(at.output / 'out')\n"),),
    arguments=(
        *("--model_type=gpt2", "--tokenizer_name=tokenizer", "--train_file=text.txt"),
        "--config_overrides=vocab_size=22,n_positions=16,n_embd=16,n_layer=2,n_head=2",
        # 39 samples: 7 batches for each of 2 ranks, so 4 steps in an epoch, the last of one batch.
        *("--block_size=16", "--max_train_samples=39", "--max_eval_samples=10"),
        *("--do_train", "--do_eval", "--eval_strategy=steps", "--eval_steps=3"),
        *("--num_train_epochs=3", "--per_device_train_batch_size=3"),
        *("--gradient_accumulation_steps=2", "--learning_rate=0.01", "--dataloader_num_workers=1"),
        *("--save_steps=5", "--logging_steps=3", "--use_cpu", "--report_to=none"),
    ),
    data=_tokenizer_and_text,
    hub=_stay_offline,
)

EXAMPLES = {
    "own-nanogpt": NANOGPT,
    "own-lightning-transformer": LIGHTNING_TRANSFORMER,
    "own-lightning-gan": LIGHTNING_GAN,
    "own-accelerate": ACCELERATE,
    "own-transformers-clm": TRANSFORMERS_CLM,
}
