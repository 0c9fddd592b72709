"""A process ends right after its last collective, while a gloo thread still holds its tensor."""

import subprocess
import sys
from pathlib import Path

# A gloo thread is the last to release the tensor, and takes its time. The group outlives its destruction,
# as a group used by DDP does.
ENDS_AT_ONCE = """
import os, sys, threading, time
import torch, torch.distributed as dist
from hpcrun.train.parallel.process_group import cleanup_distributed

class Slow:
    def __del__(self):
        letting_go.set()
        until = time.monotonic() + 0.5
        while time.monotonic() < until:
            pass
        print("let go", flush=True)

rank = 0 if os.fork() else 1
store = dist.FileStore(sys.argv[1], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
tensor = torch.ones(1)
if rank == 1:
    store.wait(["only gloo has it"])
    dist.all_reduce(tensor)
    os._exit(0)
letting_go, kept = threading.Event(), dist.group.WORLD
tensor.slow = Slow()
dist.all_reduce(tensor, async_op=True)
del tensor
store.set("only gloo has it", "")
letting_go.wait()
cleanup_distributed()
"""


def test_a_process_that_has_left_its_group_may_end_immediately(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", ENDS_AT_ONCE, str(tmp_path / "store")],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "let go\n"), done.stderr
