"""Weights leave to, and come from, torch.distributed.checkpoint and Hugging Face's safetensors."""

import json
import pickle
import resource
import shutil
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.fsdp import fully_shard

from hpcrun import Checkpointer
from hpcrun.checkpoint.export import INDEX_OF_SHARDS, export_model, write_shards
from hpcrun.checkpoint.stored_model import StoredModel
from hpcrun.checkpoint.weights import open_weights
from hpcrun.cli.main import guarded
from hpcrun.errors import UserError
from hpcrun.storage.errors import CheckpointError
from hpcrun.storage.store import CheckpointStore
from hpcrun.train.model.initial_weights import load_initial_weights
from tests.support.kills import killed_at_each_step
from tests.support.on_ranks import ranks
from tests.support.training.forks import fork_ranks


class Net(nn.Module):
    """A model with uneven sizes, a buffer, a scalar, an empty tensor, tied weights and a second type."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.tokens, self.inner = nn.Embedding(7, 5), nn.Linear(5, 5)
        self.norm = nn.BatchNorm1d(5)
        self.out = nn.Linear(5, 7, bias=False)
        self.out.weight = self.tokens.weight
        self.register_buffer("scale", torch.tensor(float(seed)))
        self.register_buffer("none", torch.empty(0))
        self.register_buffer("bits", torch.randn(3).bfloat16())


def require_equal(first: dict[str, Tensor], second: dict[str, Tensor]) -> None:
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert value.dtype == second[name].dtype, name
        assert torch.equal(value, second[name]), name


@pytest.fixture
def store(root: Path) -> CheckpointStore:
    """Return a folder of a Checkpointer with two steps; step 2 has the weights of ``Net(2)``."""
    for step in (1, 2):
        model = Net(step)
        with Checkpointer(
            root, model=model, optimizer=torch.optim.SGD(model.parameters()), every=1
        ) as saving:
            if step == 2:
                saving.restore()
                model.load_state_dict(Net(2).state_dict())
            saving.save(step)
    return CheckpointStore(root, "7-1", patience=0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_dcp_reads_an_export_in_plain_pytorch(store: CheckpointStore, tmp_path: Path) -> None:
    exported = export_model(store, 2, tmp_path / "out", kind="dcp")
    files = [*(tmp_path / "out").iterdir()]
    assert exported == {"tensors": 12, "bytes": sum(file.stat().st_size for file in files)}
    model = Net(5)
    state = model.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "out", no_dist=True)
    require_equal(state, Net(2).state_dict())
    dcp_to_torch_save(tmp_path / "out", tmp_path / "one.pt")
    require_equal(torch.load(tmp_path / "one.pt", weights_only=True), Net(2).state_dict())


@ranks(2)
def test_a_sharded_model_leaves_whole_and_comes_back_in_shards(
    rank: int, root: Path, tmp_path: Path
) -> None:
    def sharded(seed: int) -> Net:
        model = Net(seed)
        fully_shard(model.inner)
        fully_shard(model)
        return model

    model = sharded(2)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(root, model=model, optimizer=optimizer, every=1) as saving:
        saving.save(4)
    store = CheckpointStore(root, "7-1")
    if rank == 0:
        export_model(store, 4, tmp_path / "out", kind="dcp")
    torch.distributed.barrier()
    again = sharded(5)
    state: dict[str, Any] = again.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "out")
    for name, value in Net(2).state_dict().items():
        found = state[name].full_tensor() if hasattr(state[name], "full_tensor") else state[name]
        assert torch.equal(found, value), name
    # A checkpoint of torch, with more than the model, is a source of weights.
    dcp.save(
        {"model": model.state_dict(), "optimizer": {"step": torch.ones(3), "plain": [1, "a"]}},
        checkpoint_id=tmp_path / "torch",
    )
    loaded = Net(7)
    load_initial_weights(loaded, str(tmp_path / "torch"))
    require_equal(loaded.state_dict(), Net(2).state_dict())


def test_shards_have_the_names_and_the_index_of_hugging_face(
    store: CheckpointStore, tmp_path: Path
) -> None:
    model = StoredModel(store, 2)
    tmp_path.joinpath("many").mkdir()
    write_shards(model, tmp_path / "many", {"format": "pt"}, limit=200)
    index = json.loads((tmp_path / "many" / INDEX_OF_SHARDS).read_text())
    found: dict[str, Tensor] = {}
    for file in sorted(set(index["weight_map"].values())):
        inside = load_file(tmp_path / "many" / file)
        assert [index["weight_map"][name] for name in inside] == [file] * len(inside)
        found |= inside
    names = sorted(path.name for path in (tmp_path / "many").iterdir())
    assert names[0] == f"model-00001-of-{len(names) - 1:05d}.safetensors"
    assert len(names) > 3
    require_equal({name: found[name] for name in Net(2).state_dict()}, Net(2).state_dict())
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    export_model(store, 2, tmp_path / "one", kind="safetensors")
    assert [path.name for path in (tmp_path / "one").iterdir()] == ["model.safetensors"]
    require_equal(load_file(tmp_path / "one" / "model.safetensors"), Net(2).state_dict())


@pytest.mark.parametrize("kind", ["dcp", "safetensors", "step", "steps", "run", "file"])
def test_every_format_is_a_source_of_initial_weights(
    store: CheckpointStore, tmp_path: Path, kind: str
) -> None:
    source = {"step": store.path(2), "steps": store.root, "run": store.root.parent}.get(kind)
    if source is None:
        source = tmp_path / ("w.safetensors" if kind == "file" else kind)
        export_model(store, 2, source, kind="safetensors" if kind == "file" else kind)
    before = sorted(tmp_path.rglob("*"))
    model = Net(9)
    load_initial_weights(model, str(source))
    require_equal(model.state_dict(), Net(2).state_dict())
    assert sorted(tmp_path.rglob("*")) == before


def test_names_that_do_not_fit_are_reported_with_the_remedy(tmp_path: Path) -> None:
    plain = {name: value for name, value in Net(2).state_dict().items() if name != "out.weight"}
    source = tmp_path / "w.safetensors"

    def refused(tensors: dict[str, Tensor], renames: dict[str, str | None] | None = None) -> str:
        save_file(tensors, source)
        model = Net(3)
        with pytest.raises(UserError) as error:
            load_initial_weights(model, str(source), renames)
        require_equal(model.state_dict(), Net(3).state_dict())
        assert str(error.value).startswith("train.init_from: ")
        assert "\n" not in str(error.value)
        return str(error.value)

    def loads(tensors: dict[str, Tensor], renames: dict[str, str | None]) -> None:
        save_file(tensors, source)
        model = Net(3)
        load_initial_weights(model, str(source), renames)
        require_equal(model.state_dict(), Net(2).state_dict())

    prefixed = {f"net.{name}": value for name, value in plain.items()}
    text = refused(prefixed)
    assert "has no tokens.weight (12 tensors are missing)" in text
    assert "has net.bits, which the model does not have (11 such tensors)" in text
    assert "set train.init_rename={'net.': ''}" in text
    loads(prefixed, {"net.": ""})
    wrong = {name.replace("inner", "iner"): value for name, value in plain.items()}
    assert "did you mean iner.weight? train.init_rename renames" in refused(wrong)
    loads(wrong, {"iner": "inner"})
    more = {**plain, "head.weight": torch.ones(2), "head.bias": torch.ones(2)}
    assert "leave it out with train.init_rename={'head.bias': null}" in refused(more)
    loads(more, {"head.": None})
    assert "no tensor of the files begins with nett." in refused(prefixed, {"nett.": ""})
    assert "both become inner.bias" in refused(plain, {"inner.weight": "inner.bias"})


def test_only_files_that_the_index_names_are_read(tmp_path: Path) -> None:
    plain = {name: value for name, value in Net(2).state_dict().items() if name != "out.weight"}
    save_file(plain, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"other": torch.ones(1)}, tmp_path / "consolidated.safetensors")
    index = tmp_path / INDEX_OF_SHARDS
    index.write_text(
        json.dumps({"weight_map": dict.fromkeys(plain, "model-00001-of-00001.safetensors")})
    )
    model = Net(3)
    load_initial_weights(model, str(tmp_path))
    require_equal(model.state_dict(), Net(2).state_dict())
    for content, words in (
        (
            '{"weight_map": {"a": "gone.safetensors"}}',
            "names gone.safetensors, which does not exist",
        ),
        ('{"weight_map": {"a": "../x"}}', "names ../x, which does not exist"),
        ("[]", "index.json cannot be read"),
    ):
        index.write_text(content)
        with pytest.raises(UserError, match=words):
            open_weights(tmp_path)


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_a_damaged_or_hostile_dcp_folder_is_refused(store: CheckpointStore, tmp_path: Path) -> None:
    folder = tmp_path / "dcp"
    export_model(store, 2, folder, kind="dcp")
    data, metadata = folder / "__0_0.distcp", folder / ".metadata"
    whole = data.read_bytes()
    for content, words in ((whole[:100], "cannot be read"), (None, "cannot be read: FileNotFound")):
        data.unlink() if content is None else data.write_bytes(content)
        with pytest.raises(UserError, match=words):
            load_initial_weights(Net(3), str(folder))
    for raw, words in (
        (pickle.dumps(Bomb(tmp_path / "ran")), r"\.metadata names (pathlib|builtins)"),
        (b"\x80", "cannot be read: EOFError|cannot be read: UnpicklingError"),
        (pickle.dumps({}), "holds no metadata"),
    ):
        metadata.write_bytes(raw)
        with pytest.raises(UserError, match=words):
            open_weights(folder)
    assert not (tmp_path / "ran").exists()


def test_wrong_requests_are_one_line_and_leave_nothing(
    store: CheckpointStore, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").mkdir()
    before = sorted(tmp_path.rglob("*"))
    for words, expected in (
        ("there --format dcp", "there: exists already; remove it, or name a new folder"),
        ("w.pt --format dcp", "w.pt: has the suffix of another format than dcp"),
        ("w --format pt", "w: the format pt is one file; end it in .pt"),
        ("w", "w: unknown format; end it in .safetensors, .pt, .pth, or name a folder"),
        ("no/w --format dcp", "no/w: the folder no does not exist"),
        ("w --format dpc", "--format: invalid choice: 'dpc'"),
    ):
        with pytest.raises(SystemExit) if "dpc" in words else warnings.catch_warnings() as ended:
            code = guarded(["export", str(store.root), *words.split()])
        code = ended.value.code if "dpc" in words else code
        err = capsys.readouterr().err
        assert (code, err.count("\n")) == (2, 1), words
        assert expected in err
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("name", "kind"),
    [("m.pt", "pt"), ("m.safetensors", "safetensors"), ("m", "dcp"), ("m", "safetensors")],
)
def test_a_killed_or_refused_export_leaves_nothing(
    store: CheckpointStore, tmp_path: Path, name: str, kind: str
) -> None:
    target, before = tmp_path / name, {*tmp_path.iterdir()}
    for place in killed_at_each_step(lambda: export_model(store, 2, target, kind=kind)):
        assert {*tmp_path.iterdir()} - before <= {target, *tmp_path.glob(f".{name}.*")}, place
        if target.is_dir():
            assert len([*target.iterdir()]) == (2 if kind == "dcp" else 1), place
            shutil.rmtree(target)
    # The last export was not killed, and has removed what the others have left.
    assert {*tmp_path.iterdir()} == before | {target}

    def play(_: int) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, 100))
        with pytest.raises(CheckpointError, match=f"full{name}: cannot be written: "):
            export_model(store, 2, tmp_path / f"full{name}", kind=kind)

    (tmp_path / "logs").mkdir()
    assert fork_ranks(1, play, tmp_path / "logs") == [0], (tmp_path / "logs/rank-0.log").read_text()
    assert [path.name for path in tmp_path.iterdir() if "full" in path.name] == []
