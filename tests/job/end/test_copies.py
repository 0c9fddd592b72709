"""A script of one process that is started once per GPU gets a line; a distributed script gets none."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from hpcrun.job.script.copies import CopyWatch, is_listening, same_numbers
from hpcrun.job.script.end import ProgressWatch
from hpcrun.job.script.rank_words import knows_ranks
from hpcrun.job.script.watch import ScriptWatch
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.signals import StopFlag
from hpcrun.run.directory import create
from hpcrun.run.events import Attempt
from tests.scripts_of_others import DDP

TRAINS = """
import numpy as np
import torch
from torchvision import datasets
from parts.net import Block

model = torch.compile(Block())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model(torch.ones(4)).sum().backward()
torch.save(model.state_dict(), "checkpoint.pt")
"""
LINE = "copies of it run, and they make no process group"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a package that scripts import."""
    (tmp_path / "parts").mkdir()
    (tmp_path / "parts" / "net.py").write_text(
        "from torch import nn\nclass Block(nn.Linear): ...\n"
    )
    return tmp_path


@pytest.mark.parametrize(
    ("text", "knows"),
    [
        (TRAINS, False),
        (TRAINS + "import json, hpcrun\nhpcrun.report(step=1)\n", False),
        (DDP, True),
        (TRAINS + 'part = os.environ["SLURM_PROCID"]\n', True),
        (TRAINS + "import other.ranks\n", True),
        (TRAINS + "from lightning import Trainer\n", True),
        (TRAINS + "import unheard_of\n", None),
        (TRAINS + "import filelock\n", None),
        (TRAINS + "import wandb\nwandb.agent('sweep', train)\n", None),
        (TRAINS + "import os\nown = {**os.environ}\n", True),
        (TRAINS + "import platform\nout = platform.node()\n", True),
        ("import torch\ntorch.save(torch.ones(2), 'model.pt')\n", False),
        ('"""Not for a rank."""\n' + TRAINS + "# every rank\ndef f():\n  'a rank'\n", False),
        ("import numpy as np\nnp.savez('features', np.ones(2))\n", False),
        ("model.save_pretrained('out')\nimport os\nprint(os.getpid())\n", True),
        ("print(1)\n", None),
        ("print(\n", None),
    ],
)
def test_the_source_shows_if_copies_can_divide_work(
    folder: Path, text: str, knows: bool | None
) -> None:
    (folder / "other").mkdir()
    (folder / "other" / "ranks.py").write_text("from os import environ\nme = environ['RANK']\n")
    (folder / "train.py").write_text(text)
    assert knows_ranks(["python", "train.py", "--lr", "1"], folder) is knows


def test_other_programs_are_not_judged(folder: Path) -> None:
    (folder / "train.py").write_text(TRAINS)
    assert knows_ranks(["./solver", "input"], folder)
    assert knows_ranks(["bash", "-c", "python train.py --part $RANK"], folder)
    assert knows_ranks(["bash", "-c", "python train.py"], folder) is None
    assert knows_ranks(["python", "-m", "package.train"], folder) is None
    assert knows_ranks(["python", "missing.py"], folder) is None


def test_copies_get_one_line_soon_or_at_the_end(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(TRAINS)
    with socket.socket() as unused:
        unused.bind(("", 0))
        port = unused.getsockname()[1]
        command = ["python", "train.py"]
        early = CopyWatch(command, folder, folder, port, 4, after=0.0)
        early.look()
        early.look(ended=True)
        assert capfd.readouterr().err.count(f"hpcrun: python train.py: 4 {LINE}") == 1
        late = CopyWatch(command, folder, folder, port, 4, after=3600.0)
        late.look()
        assert capfd.readouterr().err == ""
        run, attempt = create(folder / "run", "{}\n", {}), Attempt("7", 0)
        progress, config = ProgressWatch(run, attempt, 0), DistributedConfig(rank=0, world_size=4)
        with subprocess.Popen(["true"]) as child:
            watch = ScriptWatch(
                child, run, attempt, StopFlag(), config, signal.SIGUSR2, progress,
                late_signal=0.0, copies=late,
            )  # fmt: skip
            assert watch.wait(0.0) == 0
        assert capfd.readouterr().err.count(LINE) == 1
        # A process group, as the port shows, or a single rank.
        assert not is_listening(port)
        unused.listen()
        assert is_listening(port)
        CopyWatch(command, folder, folder, port, 4, after=0.0).look(ended=True)
    CopyWatch(command, folder, folder, port, 1, after=0.0).look(ended=True)
    assert capfd.readouterr().err == ""


def test_equal_numbers_of_all_ranks_mean_copies(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    losses = "".join(f"step {step} loss {1 / step:.4f}\n" for step in range(1, 9))
    first, second = (folder / f"rank-0000{rank}.log" for rank in range(2))
    first.write_text(losses + "hpcrun: only here\n")
    second.write_text(losses[: losses.index("step 6")] + "step 6 lo")
    assert same_numbers(folder, 2)
    for command, lines in ((["python", "-m", "package.train"], 1), (["python", "-m", "ranks"], 0)):
        watch = CopyWatch(command, folder, folder, 1, 2, after=0.0)
        watch.look()
        assert capfd.readouterr().err == ""
        watch.look(ended=True)
        assert capfd.readouterr().err.count(LINE) == lines
    about = "torch 2.6.0\ncuda 12.4\npython 3.11\ndriver 550.54\nloss 0.5\nloss 0.5\nloss 0.5\n"
    for log in (first, second):
        log.write_text(about)
    assert not same_numbers(folder, 2)
    first.write_text(losses)
    second.write_text(losses.replace("loss 0", "loss 1"))
    assert not same_numbers(folder, 2)
    second.write_text("")
    assert not same_numbers(folder, 2)
    assert not same_numbers(folder, 3)
