"""A script of one process that is started once per GPU gets a line; a distributed script gets none."""

import signal
import socket
import subprocess
from pathlib import Path

import pytest

from hpcrun.config.commands.rank_words import knows_ranks, uses_mpi
from hpcrun.job.finalize import finalize
from hpcrun.job.policy import Budgets
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.script.copies import CopyWatch, is_listening, same_numbers, was_used
from hpcrun.ranks.script.end import ProgressWatch
from hpcrun.ranks.script.watch import ScriptWatch
from hpcrun.ranks.signals import StopFlag
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import create
from hpcrun.run.files import read_json
from tests.support.journal import record_event
from tests.support.scripts_of_others import DDP

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
        ("import torch\ntorch.save(torch.nn.Linear(2, 1).state_dict(), 'model.pt')\n", False),
        ("import pandas\npandas.read_csv('a').to_csv('b')\n", False),
        ("import numpy\nnumpy.savetxt(f'{numpy.random.rand()}', [1])\n", None),
        ('"""Every rank trains."""\n' + TRAINS + "# torch.distributed\n", False),
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


@pytest.mark.parametrize(
    ("text", "words", "lines"),
    [
        (TRAINS, ["train.py"], 1),
        (TRAINS, ["--max-restarts", "0", "train.py", "--lr", "1"], 1),
        (TRAINS + "import unheard_of\n", ["train.py"], 0),
        (TRAINS + "import accelerate\naccelerator = accelerate.Accelerator()\n", ["train.py"], 0),
        (TRAINS, ["-m", "package.train"], 0),
    ],
)
def test_copies_under_a_launcher_are_found_by_their_source(
    folder: Path, text: str, words: list[str], lines: int, capfd: pytest.CaptureFixture[str]
) -> None:
    (folder / "train.py").write_text(text)
    with socket.create_server(("127.0.0.1", 0)) as launcher:
        port = launcher.getsockname()[1]
        watch = CopyWatch(words, folder, folder, port, 4, after=0.0, launched=True)
        watch.look(ended=True)
        watch.look(ended=True)
    assert capfd.readouterr().err.count(f"{' '.join(words)}: 4 {LINE}") == lines


MPI_PROGRAM = "from mpi4py import MPI\nprint(MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)\n"
LIGHTNING = "import lightning as L\nL.Trainer(max_epochs=1).fit(model, data)\n"


@pytest.mark.parametrize(
    ("text", "outputs", "environ", "words"),
    [
        (MPI_PROGRAM, ["0 1\n"] * 2, {}, "each as rank 0 of 1"),
        (MPI_PROGRAM, ["0 1 took 2.5 s\n", "0 1 took 2.75 s\n"], {}, "each as rank 0 of 1"),
        # Ranks that have found each other, also without a variable: PMI-1 reads those of Slurm.
        (MPI_PROGRAM, ["0 2\n", "1 2\n"], {}, None),
        (MPI_PROGRAM, ["sum 1.5\n", ""], {}, None),
        (MPI_PROGRAM, ["0 1\n"] * 2, {"PMIX_RANK": "0"}, None),
        (LIGHTNING, ["epoch\n", ""], {}, "Lightning's trainer has made no process group"),
        (LIGHTNING + "import os\nme = os.environ['RANK']\n", ["epoch\n", ""], {}, None),
    ],
)
def test_copies_of_mpi_programs_or_trainers_get_a_line(
    folder: Path, text: str, outputs: list[str], environ: dict[str, str], words: str | None
) -> None:
    (folder / "t.py").write_text(text)
    for rank, output in enumerate(outputs):
        (folder / f"rank-0000{rank}.log").write_text(output)
    told: list[str] = []
    watch = CopyWatch(
        ["python", "t.py"], folder, folder, 1, 2, after=0.0, environ=environ, note=told.append
    )
    watch.look()
    assert told == []
    watch.look(ended=True)
    assert [words in line for line in told if words] == [True] * (words is not None)
    assert words is not None or told == []


def test_a_compiled_mpi_program_is_found_by_its_library(folder: Path) -> None:
    program = folder / "solver"
    for content, found in (
        (b"\x7fELF..libmpi.so.40..", True),
        (b"..MPI_Init..", True),
        (b"..", False),
    ):
        program.write_bytes(content)
        assert uses_mpi(["./solver", "in"], folder) is found
    assert not uses_mpi(["./absent"], folder)


def test_a_port_counts_as_used_after_its_end() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            connection, _ = server.accept()
            connection.close()
    assert not is_listening(port)
    assert was_used(port)


def test_a_run_of_copies_does_not_finish_without_a_word(tmp_path: Path) -> None:
    run, attempt = create(tmp_path / "a", "{}\n", {}), Attempt("7", 0)
    record_event(run, "opened", attempt=attempt, script=True, ranks=4)
    record_event(run, "copies", attempt=attempt, reason="t.py: 4 copies of it run")
    assert finalize(run, attempt, 0, Budgets(script=True)).line == "t.py: 4 copies of it run"
    result = read_json(run.result) or {}
    assert (result["state"], result["reason"]) == ("finished", "t.py: 4 copies of it run")
