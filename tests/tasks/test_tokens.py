"""Token shards: the format, damage, the command, packing, documents, and the task on them."""

import gzip
import json
import math
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from hpcrun import UserError, training_steps
from hpcrun.config import Config
from hpcrun.tasks.gpt import GPT
from hpcrun.tasks.token_model import TokenModel, TokenWindows
from hpcrun.tasks.tokens.__main__ import main
from hpcrun.tasks.tokens.shards import open_source
from hpcrun.tasks.tokens.writing import write_folder
from tests.kills import killed_at_each_step

SMALL = {"layers": 1, "heads": 2, "width": 16, "context": 8}
TEXTS = ["one two three", "four", "", "ten eleven", "five six seven eight nine"]


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A folder of two shards: two documents each."""
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": text}) + "\n\n" for text in TEXTS))
    assert main([str(tmp_path / "tokens"), str(lines), "--shard-tokens", "18"]) == 0
    return tmp_path / "tokens"


def task(*paths: Path, model: dict | None = None, **data: object) -> TokenModel:
    own = {"paths": [str(path) for path in paths], **data}
    return TokenModel(Config.model_validate({"model": model or SMALL, "data": own}))


def flat(path: Path, count: int, dtype: str = "<u2") -> Path:
    np.arange(count, dtype=dtype).tofile(path)
    return path


def test_shards_hold_every_document_with_its_end_token(shards: Path):
    source = open_source(shards, "train", "uint16")
    assert [shard.values.dtype for shard in source.shards] == [np.dtype("<u2")] * 2
    found = []
    for shard in source.shards:
        for start, end in zip([0, *shard.ends[:-1]], shard.ends, strict=True):
            assert shard.values[end - 1] == 256
            found.append(bytes(shard.values[start : end - 1].tolist()).decode())
    assert found == [text for text in TEXTS if text]


def test_windows_pack_documents_without_a_gap_and_number_them(shards: Path):
    source = open_source(shards, "train", "uint16")
    windows = TokenWindows(source, 4, 257, boundaries=True)
    tokens = np.concatenate([windows[i]["tokens"][:-1].numpy() for i in range(len(windows))])
    assert len(windows) == sum((shard.tokens - 1) // 4 for shard in source.shards) > 5
    whole = [shard.values[: (shard.tokens - 1) // 4 * 4] for shard in source.shards]
    assert tokens.tolist() == np.concatenate(whole).tolist()
    for sample in (windows[i] for i in range(len(windows))):
        after_end = torch.nn.functional.pad(sample["tokens"][:-1] == 256, (1, 0))
        assert torch.equal(sample["documents"], after_end.cumsum(0))


def test_a_flat_file_has_the_same_windows_and_documents(tmp_path: Path):
    values = np.array([5, 6, 9, 7, 9, 9, 8, 1, 2, 3, 4], dtype="<u2")
    path = tmp_path / "train.bin"
    values.tofile(path)
    source = open_source(path, "train", "uint16")
    windows = TokenWindows(source, 5, 10, boundaries=True, end_token=9)
    assert windows[1]["tokens"].tolist() == [9, 8, 1, 2, 3, 4]
    assert windows[0]["documents"].tolist() == [0, 0, 0, 1, 1, 2]
    assert len(windows) == 2


def test_any_number_of_ranks_reads_the_same_tokens(shards: Path, tmp_path: Path):
    other = flat(tmp_path / "other.bin", 200)
    learner = task(shards, other, weights=[1, 3], model={**SMALL, "vocabulary": 257})

    def read(ranks: int, first: int, workers: int = 0) -> list[list[list[int]]]:
        every = [
            training_steps(
                learner.train_dataset(), range(first, 6), rank=rank, world_size=ranks, batch_size=6,
                accumulation=1, seed=2, workers=workers, pin_memory=False,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        steps = zip(*every, strict=True)
        return [[row for (part,) in step for row in part["tokens"].tolist()] for step in steps]

    whole = read(1, 0)
    assert read(3, 0) == whole
    assert read(2, 4, workers=1) == whole[4:]


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("train-00000.bin", b"\0" * 41, r"train-00000.bin: damaged: 41 bytes instead of \d+"),
        ("train-00001.bin", None, "cannot be read: No such file"),
        ("train-00000.ends.npy", b"\x93NUMPY", r"train-00000.ends.npy: damaged: "),
        ("tokens.json", b"{", "tokens.json: is not a description of hpcrun-tokens 1"),
        ("tokens.json", b"[]", "tokens.json: is not a description of hpcrun-tokens 1"),
        ("tokens.json", b'{"format": "x"}', "its format is 'x'"),
        ("tokens.json", None, "has no tokens.json; name a folder made by"),
    ],
)
def test_a_damaged_folder_gives_one_line(shards: Path, name: str, content: bytes | None, line: str):
    if content is None:
        (shards / name).unlink()
    else:
        (shards / name).write_bytes(content)
    with pytest.raises(UserError, match=line) as caught:
        task(shards).prepare()
    assert "\n" not in str(caught.value)


def test_a_changed_byte_is_found(shards: Path, capsys):
    path = shards / "train-00001.bin"
    content = bytearray(path.read_bytes())
    content[1] = 7
    path.write_bytes(content)
    assert main([str(shards), "--verify"]) == 2
    assert "its SHA-256 is not that of tokens.json" in capsys.readouterr().err
    with pytest.raises(UserError, match="SHA-256"):
        task(shards, verify=True).prepare()
    task(shards).prepare()
    windows = task(shards).train_dataset()
    with pytest.raises(UserError, match=r"token 1908 at 0 is outside the vocabulary of 257"):
        [windows[index] for index in range(len(windows))]


def test_ends_that_do_not_ascend_are_refused_before_training(shards: Path):
    path = shards / "train-00000.ends.npy"
    ends = np.load(path)
    ends[0] = ends[1]
    np.save(path, ends)
    with pytest.raises(UserError, match="its ends do not ascend"):
        task(shards).prepare()


def test_a_flat_file_says_what_it_lacks(tmp_path: Path):
    odd = tmp_path / "odd.bin"
    odd.write_bytes(b"abc")
    for learner, line in (
        (task(odd), "3 bytes are not a whole number of uint16 tokens"),
        (task(flat(tmp_path / "a.bin", 50)), "model.vocabulary: a flat file"),
        (task(tmp_path / "absent.bin"), "absent.bin: cannot be read: No such file"),
        (
            task(
                flat(tmp_path / "a.bin", 50), model={**SMALL, "vocabulary": 50}, boundaries="loss"
            ),
            "a.bin: a flat file has no index of documents; set data.end_token",
        ),
        (
            task(flat(tmp_path / "b.bin", 8), model={**SMALL, "vocabulary": 50}),
            "no shard fills a sample of 9 tokens",
        ),
    ):
        with pytest.raises(UserError, match=line):
            learner.train_dataset()


def test_sources_of_two_tokenizers_are_refused(shards: Path, tmp_path: Path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in shards.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    text = (copy / "tokens.json").read_text()
    (copy / "tokens.json").write_text(text.replace('"bytes"', '"other 1234"'))
    with pytest.raises(UserError, match="its tokenizer is other 1234, but"):
        task(shards, copy).train_dataset()


def test_the_loss_counts_no_prediction_across_documents(shards: Path):
    learner = task(shards, boundaries="loss")
    model = learner.build_model()
    windows = learner.train_dataset()
    batch = torch.utils.data.default_collate([windows[0], windows[1]])
    logits = model(batch["tokens"][:, :-1])
    total, count = torch.zeros(()), 0
    for row in range(2):
        for place in range(8):
            if batch["tokens"][row, place] != 256:
                target = batch["tokens"][row, place + 1].long()
                total, count = total + F.cross_entropy(logits[row, place], target), count + 1
    assert 0 < count < 16
    torch.testing.assert_close(learner.loss(model, batch), total / count)
    assert learner.weight(batch) == count
    assert task(shards).weight(task(shards).train_dataset()[0]) is None


def test_attention_within_documents_is_that_of_each_document_alone():
    shape = task(Path("unread")).shape
    model = GPT(shape, seed=1, vocabulary=50).eval()
    tokens = torch.randint(0, 50, (1, 8), generator=torch.Generator().manual_seed(1))
    documents = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
    packed = model(tokens, documents)
    torch.testing.assert_close(packed[:, :3], model(tokens[:, :3]))
    # The second document starts at position 3: rotary attention depends on differences only.
    torch.testing.assert_close(packed[:, 3:], model(tokens[:, 3:]))
    assert not torch.allclose(packed[:, 3:], model(tokens)[:, 3:])


def test_the_command_writes_all_or_nothing(tmp_path: Path, capsys):
    good, bad = tmp_path / "good.txt", tmp_path / "bad.jsonl.gz"
    good.write_text("text " * 100)
    with gzip.open(bad, "wt") as file:
        file.write('{"text": "fine"}\n{"other": 1}\n')
    latin = tmp_path / "latin.txt"
    latin.write_bytes(b"caf\xe9")
    half = tmp_path / "half.jsonl"
    half.write_text('{"text": "\\ud83d"}\n')
    damaged = tmp_path / "damaged.jsonl.gz"
    damaged.write_bytes(bad.read_bytes()[:10] + b"\xff" * 20)
    for arguments, line in (
        ([bad], "bad.jsonl.gz:2: has no text in a JSON object"),
        ([latin], "latin.txt: is not UTF-8 at byte 3"),
        ([half], "half.jsonl:1: text has half of a surrogate pair at character 0"),
        ([damaged], "damaged.jsonl.gz: cannot be read"),
        ([tmp_path / "absent.txt"], "absent.txt: cannot be read"),
        ([], "no input"),
        ([good, "--validation-fraction", "1"], "--validation-fraction: should be from 0"),
        ([good, "--tokenizer", tmp_path / "absent.json"], "--tokenizer: "),
    ):
        assert main([str(tmp_path / "out"), *map(str, arguments)]) == 2
        said = capsys.readouterr().err
        assert line in said
        assert said.count("\n") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "bad.jsonl.gz", "damaged.jsonl.gz", "good.txt", "half.jsonl", "latin.txt",
    ]  # fmt: skip
    assert main([str(tmp_path / "out"), str(good)]) == 0
    assert main([str(tmp_path / "out"), str(good)]) == 2
    assert "out: exists already" in capsys.readouterr().err


def write_few(folder: Path, documents: Iterable[tuple[str, list[int]]]) -> None:
    write_folder(
        folder,
        documents,
        vocabulary=300,
        tokenizer="test",
        end_token=None,
        shard_tokens=14,
        validation=lambda name: name == "3",
    )


def documents() -> Iterator[tuple[str, list[int]]]:
    return ((str(number), [number] * 7) for number in range(6))


def test_a_killed_writer_leaves_no_folder_or_a_complete_one(tmp_path: Path):
    folder = tmp_path / "made" / "tokens"
    seen, left = set(), 0
    for place in killed_at_each_step(lambda: write_few(folder, documents())):
        complete = folder.exists()
        if complete:
            source = open_source(folder, "train", "uint16")
            for shard in source.shards:
                shard.check(hashes=True)
            assert sum(shard.tokens for shard in source.shards) == 35
            shutil.rmtree(folder)
        seen.add(complete)
        left += sum(1 for _ in tmp_path.glob("made/.*"))
        # The next start removes the draft.
        with pytest.raises(UserError, match="no documents"):
            write_few(folder, [])
        assert not [*tmp_path.glob("made/.*")], place
    # Before the rename there is nothing; after it only the durability of the name is missing.
    assert seen == {False, True}
    assert left
    assert open_source(folder, "validation", "uint16").shards[0].tokens == 7


def test_the_held_out_documents_are_validated_on_and_reported(tmp_path: Path):
    lines = tmp_path / "texts.jsonl"
    lines.write_text("".join(json.dumps({"text": "word " * 9}) + "\n" for _ in range(100)))
    assert main([str(tmp_path / "a"), str(lines), "--validation-fraction", "0.3"]) == 0
    described = json.loads((tmp_path / "a" / "tokens.json").read_text())["splits"]
    counts = {split: shards[0]["documents"] for split, shards in described.items()}
    assert sum(counts.values()) == 100
    assert 15 < counts["validation"] < 45
    learner = task(tmp_path / "a")
    validation = learner.validation_dataset()
    assert validation is not None
    assert len(validation) == (described["validation"][0]["tokens"] - 1) // 8
    report = learner.report(learner.build_model(), 2.0)
    assert report["perplexity"] == pytest.approx(math.exp(2.0))
    assert list(report["passes"]) == [str(tmp_path / "a")]


def test_a_tokenizer_of_hugging_face_is_used_if_installed(tmp_path: Path):
    pytest.importorskip("tokenizers")
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "one": 1, "two": 2, "<|end|>": 3}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "a.txt").write_text("two one three")
    arguments = [str(tmp_path / "a.txt"), "--tokenizer", str(tmp_path / "tokenizer.json")]
    assert main([str(tmp_path / "x"), *arguments, "--end-token", "absent"]) == 2
    assert main([str(tmp_path / "x"), *arguments, "--end-token", "<|end|>"]) == 0
    source = open_source(tmp_path / "x", "train", "uint16")
    assert source.shards[0].values.tolist() == [2, 1, 0, 3]
    assert (source.vocabulary, source.end_token) == (4, 3)
