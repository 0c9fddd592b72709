"""An exported model is a single file with canonical names, readable without hpcrun."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from hpcrun.checkpoint.export import export_model
from hpcrun.checkpoint.state.capture import alike, capture_shared
from hpcrun.cli.main import guarded
from hpcrun.run import directory
from hpcrun.storage.errors import CheckpointError, DamagedCheckpoint
from hpcrun.storage.store import CheckpointStore
from hpcrun.train.step.ema import WeightAverage

from .single_rank import engine


def build():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3, bias=False))
    return model, torch.optim.AdamW(model.parameters())


@pytest.fixture
def run(tmp_path):
    """Return a run with the checkpoints 1 and 2 of a compiled model, and this model."""
    made = directory.create(tmp_path / "runs" / "r", "{}\n", {})
    model, optimizer = build()
    compiled = torch.compile(model, backend="eager")
    saving = engine(made.checkpoints, "7-0")
    for step in (1, 2):
        compiled(torch.rand(5, 3)).sum().backward()
        optimizer.step()
        shared = capture_shared(compiled, optimizer, extra={})
        meta = {"validation_loss": float(step)}
        assert saving.save(step, shared, {}, meta, alike(compiled)).ok
    return made, model


@pytest.fixture
def hpcrun(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command in the folder of ``runs``, and gives exit code and output."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments):
        code = guarded(arguments)
        return (code, *capsys.readouterr())

    return command


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors"])
def test_the_export_loads_strictly_in_plain_pytorch(run, hpcrun, tmp_path, name):
    _, model = run
    if name.endswith("safetensors"):
        load_file = pytest.importorskip("safetensors.torch").load_file
    else:

        def load_file(path):
            return torch.load(path, weights_only=True)

    code, out, err = hpcrun("export", "r", name)
    assert code == 0, err
    assert "the model of r after step 2, 8 tensors" in out
    plain, _ = build()
    plain.load_state_dict(load_file(tmp_path / name), strict=True)
    for key, value in model.state_dict().items():
        assert torch.equal(plain.state_dict()[key], value)
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".model")] == []


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_exports_of_equal_runs_have_equal_bytes(tmp_path):
    pytest.importorskip("safetensors.torch")
    torch.manual_seed(3)
    model, optimizer = build()
    shared = capture_shared(model, optimizer, extra={})
    for run_name in ("first", "second"):
        assert engine(tmp_path / run_name, run_name).save(1, shared, {}, {}, alike(model)).ok
    (tmp_path / "größe").mkdir()
    kinds = {".pt": None, ".pth": None, ".safetensors": None, "-dcp": "dcp", "-st": "safetensors"}
    for suffix, kind in kinds.items():
        seen = set()
        # The order of safetensors' metadata is random: one equal pair would prove nothing.
        for number, folder in enumerate(["", "größe", *[""] * 6]):
            store = CheckpointStore(tmp_path / ("first", "second")[number % 2], "9-1", patience=0)
            target = tmp_path / folder / f"of-{number}{suffix}"
            export_model(store, 1, target, kind=kind)
            files = sorted(target.iterdir()) if target.is_dir() else [target]
            seen.add(
                tuple((file.name if target.is_dir() else "", file.read_bytes()) for file in files)
            )
        assert len(seen) == 1, suffix


def test_a_step_without_a_checkpoint_is_refused(run, hpcrun, tmp_path):
    code, _, err = hpcrun("export", "r", "model.pt", "--step", "999")
    assert (code, err) == (2, "hpcrun: --step 999: r has no such checkpoint; there are 1, 2\n")
    assert not (tmp_path / "model.pt").exists()


def test_the_best_and_the_averaged_weights_are_exported(run, hpcrun, tmp_path):
    made, model = run
    code, out, err = hpcrun("export", "r", "best.pt", "--best")
    assert code == 0, err
    assert "the model of r after step 1," in out
    code, out, err = hpcrun("export", "r", "m.pt", "--ema")
    assert (code, out) == (2, "")
    assert "step-000000002: contains no averages; train with train.ema" in err

    average = WeightAverage(model, 0.5)
    for value in average.tensors().values():
        value.fill_(7.0)
    shared = capture_shared(model, torch.optim.AdamW(model.parameters()), extra={})
    shared["ema"] = average.tensors()
    assert engine(made.checkpoints, "7-2").save(3, shared, {}, {}, alike(model)).ok
    code, out, err = hpcrun("export", "r", "m.pt", "--ema")
    assert code == 0, err
    assert "the averaged weights of r after step 3, 8 tensors" in out
    loaded = torch.load(tmp_path / "m.pt", weights_only=True)
    trained = dict(model.named_parameters())
    for name, value in model.state_dict().items():
        expected = torch.full_like(value, 7.0) if name in trained else value
        assert torch.equal(loaded[name], expected)


def test_a_damaged_checkpoint_is_not_exported(run, tmp_path):
    made, _ = run
    path = made.checkpoints / "step-000000002" / "rank-00000.bin"
    content = bytearray(path.read_bytes())
    content[40] ^= 1
    path.write_bytes(content)
    store = CheckpointStore(made.checkpoints, "7-1", patience=0)
    with pytest.raises(DamagedCheckpoint, match=r"rank-00000\.bin"):
        export_model(store, 2, tmp_path / "m.pt")
    assert not (tmp_path / "m.pt").exists()
    with pytest.raises(CheckpointError, match=r"end it in \.safetensors, \.pt"):
        export_model(store, 1, tmp_path / "m.bin")


class Scaled(nn.Linear):
    """A layer with extra state."""

    history = torch.ones(2)

    def get_extra_state(self):
        return {"history": self.history, "count": 2}

    def set_extra_state(self, state):
        self.history = state["history"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_format_refuses_values_that_it_cannot_store(root, tmp_path):
    pytest.importorskip("safetensors.torch")
    model = Scaled(2, 1)
    shared = capture_shared(model, torch.optim.SGD(model.parameters()), extra={})
    assert engine(root, "7-0").save(1, shared, {}, {}, alike(model)).ok
    model.register_buffer("phase", torch.ones(1, dtype=torch.complex128))
    shared["model"] = {"phase": model.phase}
    assert engine(root, "7-0").save(2, shared, {}, {}, alike(model)).ok
    store = CheckpointStore(root, "7-1", patience=0)
    export_model(store, 1, tmp_path / "m.pt")
    again = Scaled(2, 1)
    again.history = None
    again.load_state_dict(torch.load(tmp_path / "m.pt", weights_only=True))
    assert torch.equal(again.history, torch.ones(2))
    export_model(store, 1, tmp_path / "m", kind="dcp")
    again.history = torch.zeros(2)
    state = again.state_dict()
    dcp.load(state, checkpoint_id=tmp_path / "m", no_dist=True)
    again.load_state_dict(state)
    assert torch.equal(again.history, torch.ones(2))
    for step, what in ((1, "_extra_state is not a tensor"), (2, r"phase is torch\.complex128")):
        with pytest.raises(CheckpointError, match=f"{what}, which safetensors .* export to .pt"):
            export_model(store, step, tmp_path / "m.safetensors")


def test_verify_names_every_damaged_file_and_exits_with_an_error(run, hpcrun):
    made, _ = run
    code, out, err = hpcrun("verify", "r")
    assert code == 0, err
    assert [line.split(":")[0] for line in out.splitlines()] == ["step 2", "step 1"]
    for name in ("rank-00000.bin", "index.json"):
        path = made.checkpoints / "step-000000001" / name
        path.write_bytes(path.read_bytes()[:-1])
    code, out, _ = hpcrun("verify", "r")
    assert code == 1
    lines = [line for line in out.splitlines() if line.startswith("step 1: DAMAGED: ")]
    assert len(lines) == 2
    assert "rank-00000.bin" in lines[0]
    assert "index.json" in lines[1]
    assert hpcrun("verify", "r", "--step", "2")[0] == 0
    assert "available: 2, 1" in hpcrun("verify", "r", "--step", "9")[2]
