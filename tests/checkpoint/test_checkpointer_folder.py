"""A Checkpointer's folder on the command line, also with foreign files in it."""

import os

import pytest
import torch
from torch import nn

from hpcrun.checkpoint.checkpointer import Checkpointer
from hpcrun.cli.main import guarded


@pytest.fixture
def hpcrun(tmp_path, monkeypatch, capsys):
    """Return a function that runs a command where ``runs/mine`` has step 1: exit code, output, errors."""
    monkeypatch.chdir(tmp_path)
    model = nn.Linear(2, 2)
    with Checkpointer(
        "runs/mine", model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)
    ) as ckpt:
        ckpt.save(1)

    def command(*arguments):
        code = guarded(arguments)
        return (code, *capsys.readouterr())

    return command


def test_a_checkpointer_s_folder_is_verified_and_exported(hpcrun, tmp_path):
    code, out, _ = hpcrun("verify", "runs/mine")
    assert (code, out[:18]) == (0, "step 1: complete (")
    code, out, err = hpcrun("export", str(tmp_path / "runs" / "mine"), "m.pt")
    assert code == 0, err
    assert "runs/mine after step 1, 2 tensors" in out
    assert torch.load(tmp_path / "m.pt", weights_only=True).keys() == {"weight", "bias"}
    assert "no such run" in hpcrun("verify", "runs")[2]


def test_a_folder_writable_by_everybody_is_neither_verified_nor_exported(hpcrun, tmp_path):
    for name in ("", "step-000000001", "step-000000001/rank-00000.bin"):
        path = tmp_path / "runs" / "mine" / name
        mode = path.stat().st_mode
        path.chmod(mode | 0o002)
        for command in (("verify", "runs/mine"), ("export", "runs/mine", "m.pt")):
            code, _, err = hpcrun(*command)
            assert code == 2
            assert f"{path}: everybody may write to it; run `chmod " in err
        path.chmod(mode)


@pytest.mark.parametrize("name", ["rank-00000.bin", "manifest.json"])
def test_a_named_pipe_is_damage_and_does_not_block(hpcrun, tmp_path, name):
    path = tmp_path / "runs" / "mine" / "step-000000001" / name
    path.unlink()
    os.mkfifo(path, 0o600)
    code, out, _ = hpcrun("verify", "runs/mine")
    assert code == 1
    assert f"{path}: cannot be read: not a regular file" in out
