"""A checkpoint in one torch file, ``.pt`` or ``.pth``, as PyTorch programs save and load it."""

import pytest
import torch
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from hpcrun import AMPConfig, AMPTrainer, CheckpointError, DistributedAMPTrainer, UserError
from tests.support.on_ranks import agreed, gathered, ranks
from tests.support.training.parallelism import Net, adamw, flat
from tests.support.training.small_training import loss

X, Y = torch.arange(48.0).reshape(8, 6) / 10, torch.arange(8.0)
FP16 = AMPConfig(dtype="fp16", init_scale=1024.0, growth_interval=2)


def halving(optimizer):
    return torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)


def make(seed=0, dropout=0.5, kind=AMPTrainer, **options):
    torch.manual_seed(seed)
    options = {"scheduler": halving, "amp": FP16, "ema": 0.9, "device": "cpu"} | options
    return kind(Net(dropout), adamw, **options)


def train(made, steps):
    return [made.training_step((X, Y), loss).item() for _ in range(steps)]


def state(made):
    return [*made.module.state_dict().values(), *made.average.tensors().values()]


def test_a_file_continues_the_training_exactly(tmp_path):
    first, path = make(), tmp_path / "new" / "checkpoint.pth"
    train(first, 3)
    result = first.training_step((X, Y), loss)
    outcome = first.save_checkpoint(str(path), metadata={"epoch": 2, "loss": result})
    assert (outcome.ok, outcome.step, outcome.bytes) == (True, 4, path.stat().st_size)
    losses, wanted = train(first, 3), state(first)
    content = torch.load(path, map_location="cpu", weights_only=True)
    assert content["metadata"] == {"epoch": 2, "loss": result.item()}
    plain = Net()
    plain.load_state_dict(content["model_state_dict"])
    adamw(plain).load_state_dict(content["optimizer_state_dict"])
    torch.amp.GradScaler("cpu").load_state_dict(content["scaler_state_dict"])
    second = make(seed=1)
    restored = second.load_checkpoint(path)
    assert torch.equal(flat(plain), flat(second.module))
    assert (restored.step, second.steps, restored.meta["epoch"]) == (4, 4, 2)
    assert train(second, 3) == losses
    assert all(map(torch.equal, state(second), wanted))
    assert second.scheduler.last_epoch == first.scheduler.last_epoch
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_what_a_file_lacks_is_named(tmp_path):
    first, path = make(), tmp_path / "weights.pt"
    train(first, 1)
    first.save_checkpoint(path, 7, {"seen": [1, 2]}, include_optimizer=False)
    assert "optimizer_state_dict" not in torch.load(path, weights_only=True)
    restored = make(seed=1).load_checkpoint(path)
    assert (restored.step, restored.shared["extra"]) == (7, {"seen": [1, 2]})
    lacking = ["the file has no state of the optimizer", "the file has no state of the scheduler"]
    assert all(map(str.startswith, restored.notes, lacking))
    # A file of another program, saved from a model in DDP.
    weights = {f"module.{name}": value for name, value in first.module.state_dict().items()}
    torch.save({"model_state_dict": weights, "step": 30}, path)
    other = make(seed=1)
    assert other.load_checkpoint(path).step == other.steps == 30
    assert torch.equal(flat(other.module), flat(first.module))


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "there is no such file"),
        (b"no zip", r"not a checkpoint that torch.load\(weights_only=True\) reads"),
        ({"weight": torch.ones(1)}, "no key model_state_dict"),
        ({"model_state_dict": {"weight": torch.ones(1)}}, "weight is in the checkpoint, but not"),
    ],
)
def test_a_file_that_does_not_fit_changes_nothing(tmp_path, content, line):
    path = tmp_path / "checkpoint.pth"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        torch.save(content, path)
    made = make()
    before = flat(made.module)
    with pytest.raises(CheckpointError, match=line):
        made.load_checkpoint(path)
    assert torch.equal(flat(made.module), before)


def test_a_damaged_or_foreign_file_is_refused_in_one_line(tmp_path):
    first, path = make(), tmp_path / "checkpoint.pth"
    train(first, 2)
    crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        first.save_checkpoint(path)
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(crc32)
    whole = path.read_bytes()
    # One bit of a weight, which torch.load() does not notice.
    at = whole.index(flat(first.module)[:4].numpy().tobytes())
    flipped = bytearray(whole)
    flipped[at + 1] ^= 64
    content = torch.load(path, weights_only=True)
    files = [(bytes(flipped), "the file is damaged"), (whole[:-40], "not a checkpoint that")]
    for key, value in (("step", "abc"), ("scaler_state_dict", 3), ("metadata", 3), ("ema", [1])):
        torch.save({**content, key: value}, path)
        files.append((path.read_bytes(), f"{key} is a {type(value).__name__}, which"))
    torch.save({**content, "model_state_dict": {1: torch.ones(1)}}, path)
    files.append((path.read_bytes(), "has the key 1, which is no text"))
    plain = torch.optim.SGD(Net().parameters(), momentum=0.9).state_dict()
    torch.save({**content, "optimizer_state_dict": plain}, path)
    files.append((path.read_bytes(), "so it was not AdamW"))
    made = make(seed=1)
    before = flat(made.module)
    for file, line in files:
        path.write_bytes(file)
        with pytest.raises(CheckpointError, match=line):
            made.load_checkpoint(path)
        assert torch.equal(flat(made.module), before)
    # Any damage gives this error, and no other.
    for number in range(40, 2000, 49):
        path.write_bytes(whole[:number] + bytes([whole[number] ^ 0x88]) + whole[number + 1 :])
        try:
            made.load_checkpoint(path)
        except CheckpointError:
            continue
        assert torch.equal(flat(made.module), flat(first.module))
    torch.save({**content, "generators": {"python": 1}}, path)
    (note,) = made.load_checkpoint(path).notes
    assert "random generators of the file do not fit" in note


def test_a_failed_save_keeps_the_old_file(tmp_path, capsys):
    made, path = make(), tmp_path / "checkpoint.pth"
    with pytest.raises(CheckpointError, match=r"metadata.where: a pathlib\.\w+ cannot be saved"):
        made.save_checkpoint(path, metadata={"where": path})
    with pytest.raises(UserError, match="a folder of checkpoints always holds the optimizer"):
        made.save_checkpoint(tmp_path / "folder", include_optimizer=False)
    with pytest.raises(UserError, match="rank=1, but rank 0 writes a checkpoint file; omit rank"):
        made.save_checkpoint(path, rank=1)
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").touch()
    outcome = made.save_checkpoint(tmp_path / "file" / "checkpoint.pth")
    assert not outcome.ok
    assert "the checkpoint of step 0 was not saved: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["a.ckpt", "a.pth.tar", "a.bin"])
def test_the_suffix_of_another_file_is_refused(tmp_path, name):
    """A folder is collective: a call on rank 0 only, which means a file, would wait for ever."""
    made = make()
    for call in (made.save_checkpoint, made.load_checkpoint):
        with pytest.raises(UserError, match=f"{name}: a checkpoint file ends in .pt or .pth"):
            call(tmp_path / name)
    assert not [*tmp_path.iterdir()]
    (tmp_path / name).mkdir()
    assert made.save_checkpoint(tmp_path / name, 0).ok


@ranks(2)
def test_rank_0_writes_the_file_and_all_ranks_load_it(rank, tmp_path):
    def wrapped(seed=0, **options):
        made = make(seed, 0.0, DistributedAMPTrainer, **options)
        made.wrap_model()
        return made

    first, path = wrapped(), str(tmp_path / "checkpoint.pth")
    train(first, 2)
    if first.is_main_process:
        # Not collective: the other rank does not call it.
        assert first.save_checkpoint(path, include_optimizer=True).ok
    gathered(None)
    second = wrapped(seed=1)
    (note,) = second.load_checkpoint(path).notes
    assert note.startswith("the file has no random generators of the ranks")
    assert train(second, 2) == train(first, 2)
    agreed(flat(second.module).tolist())
    # On a rank other than 0, the call returns without a file.
    assert second.save_checkpoint(tmp_path / "again.pth").ok
    gathered(None)
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["again.pth", "checkpoint.pth"]
    with pytest.raises(UserError, match="cannot hold the shards of FSDP's ranks; save to a folder"):
        wrapped(parallel="fsdp").save_checkpoint(path)
    hooked = wrapped()
    hook_state = powerSGD_hook.PowerSGDState(process_group=None)
    hooked.model.register_comm_hook(hook_state, powerSGD_hook.powerSGD_hook)
    with pytest.raises(UserError, match=r"state that a communication hook has .*PowerSGDState"):
        hooked.save_checkpoint(path)
    errors = {}

    def keeping(_, bucket):
        errors[bucket.index()] = bucket.buffer()
        return allreduce_hook(None, bucket)

    hooked = wrapped()
    hooked.model.register_comm_hook(None, keeping)
    train(hooked, 1)
    with pytest.raises(UserError, match=r"state that a communication hook has .*keeping"):
        hooked.save_checkpoint(path)
    # A configuration is no state.
    hooked = wrapped()
    options = {"lr": 0.1}
    hooked.model.register_comm_hook(
        None, lambda _, bucket: allreduce_hook(None, bucket) if options else None
    )
    assert hooked.save_checkpoint(path).ok
