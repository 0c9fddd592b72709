"""examples/read_checkpoint.py reads a checkpoint with numpy only."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from hpcrun import Checkpointer
from tests.support.on_ranks import ranks

EXAMPLE = Path(__file__).parents[2] / "examples" / "read_checkpoint.py"


class Mixed(nn.Module):
    """A model with several types, a scalar and an empty tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(5, 3), nn.Linear(3, 7, bias=False)
        self.register_buffer("bits", torch.randn(3, 2).bfloat16())
        self.register_buffer("small", torch.randn(4).to(torch.float8_e4m3fn))
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("none", torch.empty(0, 2))
        self.register_buffer("mask", torch.tensor([True, False]))


@ranks(2)
def test_the_example_reads_a_sharded_checkpoint(rank: int, tmp_path: Path) -> None:
    model = Mixed(3)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with Checkpointer(tmp_path / "saved", model=model, optimizer=optimizer, every=1) as saving:
        saving.save(1)
    if rank != 0:
        return
    program = EXAMPLE.read_text()
    assert len([line for line in program.splitlines() if line]) <= 30
    (tmp_path / "read.py").write_text(program)
    # A module that is None cannot be imported.
    hidden = "import sys; sys.modules.update(dict.fromkeys(['torch', 'hpcrun', 'xxhash']))"
    code = f"{hidden}; exec(open('read.py').read())"
    done = subprocess.run(
        [sys.executable, "-c", code, "saved/step-000000001", "out.npz"],
        cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.stdout == "8 tensors\n", done.stderr
    found = np.load(tmp_path / "out.npz")
    wanted = Mixed(3).state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        plain = value.view(torch.uint8) if name == "small" else value
        plain = plain.float() if name == "bits" else plain
        assert found[name].dtype == plain.numpy().dtype, name
        assert found[name].shape == tuple(plain.shape), name
        assert np.array_equal(found[name], plain.numpy()), name
