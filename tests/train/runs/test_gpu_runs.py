"""A whole run that believes to have GPUs: what it does before the first step, and in which order.

The devices are the CPU, and the group with the backend ``nccl`` is one of gloo, under NCCL's rules.
"""

import json
import os
import re
import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from hpcrun import exit_codes
from hpcrun.devices import accelerator
from hpcrun.job.finalize import finalize
from hpcrun.job.policy import Budgets
from hpcrun.ranks import interfaces
from hpcrun.run.attempt import Attempt
from hpcrun.run.journal.events import Cause
from hpcrun.train.determinism import NCCL_ORDER
from hpcrun.train.parallel import strategies
from tests.support.on_ranks import forked
from tests.support.training.faulty_tasks import Exact
from tests.support.training.runs import FAILED, STOPPED_ONCE, play_run

HANG_START = 1234


START = [
    "device",
    "group of nccl, variables set: True",
    "device",
    "reduction of 1",
    "synchronization",
    "model, raised timeout: True",
    "device",
]
"""Start of a rank: variables, device, a GPU of its own, group, connection and wait, model.

No other reduction of the run uses the group of the GPUs in Python.
"""


class Built(Exact):
    """A task that notes when its model is built, and the timeout of collectives then."""

    note = staticmethod(lambda _: None)

    def build_model(self):
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        self.note(f"model, raised timeout: {backend.options._timeout.total_seconds() > HANG_START}")
        return super().build_model()


class OnDevice(DistributedDataParallel):
    """DDP that takes the number of a device, and a model on the CPU."""

    def __init__(self, module, *, device_ids, **options):
        assert device_ids
        super().__init__(module, **options)


def believe_in_gpus(folder, rank, restart):
    """Give this process two GPUs, and note the start in a file."""
    os.environ["CUDA_VISIBLE_DEVICES"] = "0,1"
    made, reduced = dist.init_process_group, dist.all_reduce

    def note(line):
        with (folder / f"rank-{rank}-{restart}.jsonl").open("a") as stream:
            stream.write(json.dumps(line) + "\n")

    def make_group(backend, **options):
        variables = all(os.environ.get(name) == value for name, value in NCCL_ORDER.items())
        note(f"group of {backend}, variables set: {variables}")
        made("gloo", **options)

    def reduce(tensor, *arguments, group=None, **options):
        if group is None:
            note(f"reduction of {tensor.numel()}")
        return reduced(tensor, *arguments, group=group, **options)

    dist.init_process_group, dist.all_reduce = make_group, reduce
    strategies.DistributedDataParallel = OnDevice
    accelerator.count = lambda: 2
    accelerator.device = lambda _: torch.device("cpu")
    accelerator.memory = lambda _: (80_000_000_000, 80_000_000_000)
    accelerator.make_current = lambda _: note("device")
    accelerator.synchronize = lambda _: note("synchronization")
    Built.note = staticmethod(note)


@forked
def test_gpus_are_chosen_and_connected_before_the_model(tmp_path):
    played = play_run(
        tmp_path,
        Built,
        *("job.cpu=false", f"train.hang_start={HANG_START}", "model.stop_at=5"),
        begin=partial(believe_in_gpus, tmp_path),
    )
    assert played.codes == STOPPED_ONCE, played.said()
    for rank in range(2):
        for restart in range(2):
            file = tmp_path / f"rank-{rank}-{restart}.jsonl"
            assert [json.loads(line) for line in file.read_text().splitlines()] == START


def never_connect(folder, address, rank, restart):
    """Believe in GPUs that never connect; rank 1 listens at ``address``."""
    believe_in_gpus(folder, rank, restart)
    accelerator.synchronize = lambda _: time.sleep(600)
    interfaces.own_interfaces = lambda: {"ib0": [address if rank else "127.0.0.1"]}


LOG = "set job.env.NCCL_DEBUG=INFO and look for the first WARN; "


@pytest.mark.parametrize(
    ("nodes", "address", "words"),
    [
        (1, "127.0.0.1", f"; NCCL cannot connect the GPUs: {LOG}"),
        (2, "127.0.0.1", f"; NCCL cannot connect the GPUs, but TCP connects the nodes: {LOG}"),
        # An address for documentation, which no host has (RFC 5737).
        (
            2,
            "192.0.2.1",
            r"; node \S+ cannot connect to node \S+ at 192.0.2.1 \(interface ib0: .*\); check ",
        ),
    ],
)
@forked
def test_a_connection_that_hangs_ends_soon_with_a_remedy(tmp_path, nodes, address, words):
    keys = ("job.cpu=false", "train.connect_timeout=3", f"train.hang_start={HANG_START}")
    played = play_run(
        *(tmp_path, Built, *keys, f"job.nodes={nodes}", f"job.gpus={2 // nodes}"),
        begin=partial(never_connect, tmp_path, address),
        nodes=[nodes],
        per_node=2 // nodes,
    )
    assert played.codes == FAILED, played.said()
    classification = finalize(played.run, Attempt("run", 0), exit_codes.FAILED, Budgets())
    assert classification.cause is Cause.HANG
    line = classification.line
    assert line.startswith("no progress for 3 s before the first step: "), line
    assert re.search(words, line), line
    assert line.endswith("raise train.connect_timeout")
