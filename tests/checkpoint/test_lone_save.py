"""A save of all ranks that one rank calls gets a line; other waits get none."""

import re
import threading
import time

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import hpcrun
from hpcrun.checkpoint import lone_save
from tests.support.on_ranks import ranks


def is_main_process():
    return dist.get_rank() == 0


class Case:
    """A training of two ranks; ``late`` is set when rank 1 may take part, so that the test ends."""

    def __init__(self, folder):
        self.folder, self.late = folder, folder / "late"
        self.model = nn.Linear(4, 4)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.saver = hpcrun.Checkpointer(
            folder / "c", model=self.model, optimizer=self.optimizer, every=1
        )

    def folder_of_torch(self):
        if is_main_process() or self.rest():
            dcp.save(self.model.state_dict(), checkpoint_id=str(self.folder / "d"))

    def folder_of_hpcrun(self):
        if dist.get_rank() == 0 or self.rest():
            self.saver.save(3)

    def whole_weights(self):
        if dist.get_rank() != 0 and not self.rest():
            return
        for one in self.model.state_dict().values():
            assert isinstance(one, DTensor)
            one.full_tensor()

    def nothing(self):
        """Wait for a rank that is late, outside of any condition."""
        self.rest()
        self.saver.save(4)

    def barrier(self):
        if not is_main_process():
            self.rest()
        if dist.get_rank() in (0, 1):
            dist.barrier()

    def rest(self):
        if dist.get_rank() == 1:
            deadline = time.monotonic() + 15
            while not self.late.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        return True


@ranks(2)
def test_a_save_that_one_rank_calls_gets_a_line(tmp_path, monkeypatch, rank):
    monkeypatch.setattr(lone_save, "SECONDS", 0.2)
    case, lines = Case(tmp_path), []

    def said(line):
        lines.append(line)
        case.late.touch()

    monkeypatch.setattr(lone_save, "say_aside", said)
    for work, call in (
        (case.folder_of_torch, "save"),
        (case.folder_of_hpcrun, "save"),
        (case.whole_weights, "full_tensor"),
        (case.nothing, None),
        (case.barrier, None),
    ):
        lines.clear()
        case.late.unlink(missing_ok=True) if rank == 0 else None
        dist.barrier()
        if call is None and rank == 0:
            threading.Timer(0.5, case.late.touch).start()
        work()
        dist.barrier()
        if rank == 0 and call is not None:
            (line,) = lines
            assert f"{call}() has waited" in line, line
            assert re.search("test_lone_save.py:.* inside `if ", line), line
        else:
            assert not lines
    case.saver.close()


@pytest.mark.parametrize(
    ("text", "line", "test"),
    [
        ("if rank == 0:\n    a()\n    b()\n", 3, "if rank == 0"),
        (
            "def f():\n    if not is_master():\n        return\n    for x in y:\n        save()\n",
            5,
            "not is_m",
        ),
        ("if step % 10 == 0:\n    save()\n", 2, ""),
        ("if rank == 0:\n    a()\nsave()\n", 3, ""),
        ("def f():\n    if rank:\n        return\ndef g():\n    save()\n", 5, ""),
        ("if broken(\n", 1, ""),
    ],
)
def test_the_condition_around_a_line_is_found(tmp_path, text, line, test):
    path = tmp_path / "program.py"
    path.write_text(text)
    found = lone_save.condition(str(path), line)
    assert test in found
    assert bool(found) == bool(test)
