"""Program of ``test_fake_gpus.py``: the trainer on fake CUDA tensors, as rank 0 of a world of fake ranks.

``python -m tests.devices.fake.train CASES`` prints a line of JSON for each way of ``WAYS`` and each case.
CASES is ``few`` or ``all``. The last case of a way has a planted mistake.
"""

import itertools
import json
import sys
import traceback
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes

from hpcrun.checkpoint.state import generators
from hpcrun.config import AMPConfig
from hpcrun.config.training import FSDP
from hpcrun.devices import accelerator
from hpcrun.ranks.collective import Ranks
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks.llama import Llama
from hpcrun.tasks.options import LanguageModelShape
from hpcrun.train.data.micro_batches import MicroBatches
from hpcrun.train.parallel import fsdp
from hpcrun.train.parallel.strategies import DDPStrategy
from hpcrun.train.step import gate
from hpcrun.train.step.trainer import DistributedAMPTrainer
from hpcrun.worker import leave
from tests.devices.fake import device

# The world, the parallelism and the sharding of each way.
WAYS: dict[str, tuple[int, str, str]] = {
    "single": (1, "single", "full"),
    "ddp": (64, "ddp", "full"),
    "fsdp": (64, "fsdp", "full"),
    "hsdp": (512, "fsdp", "hybrid"),
}
PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
STEPS = 2  # The first reads its decision immediately, the later steps read it late.
wrap_plain = DDPStrategy.wrap


@dataclass(frozen=True)
class Case:
    """Settings that lead through different parts of a step."""

    precision: str
    clip: bool
    accumulation: bool
    ema: bool
    fused: bool


def cases(which: str) -> Iterator[Case]:
    """Yield every combination, or eight combinations in which each pair of settings occurs."""
    if which == "all":
        for values in itertools.product(PRECISIONS, *[(False, True)] * 4):
            yield Case(*values)
        return
    # An orthogonal array of strength 2 with one column of four levels and four of two (L8, Taguchi).
    for a, b, c in itertools.product((False, True), repeat=3):
        yield Case(PRECISIONS[2 * a + b], c, a ^ c, b ^ c, a ^ b ^ c)


def loss(model: nn.Module, batch: Tensor) -> Tensor:
    result: Tensor = model(batch[:, :-1], batch[:, 1:])
    return result


def trainer(way: str, case: Case) -> DistributedAMPTrainer:
    """Make the trainer of rank 0 and wrap its model."""
    world, parallel, shard = WAYS[way]
    shape = LanguageModelShape(layers=1, width=64, heads=4, kv_heads=2, context=32, dropout=0.1)
    model = Llama(shape)
    if parallel == "fsdp":
        # Sharding moves a weight by assigning to its data, which does not change a fake tensor's device.
        model = model.to(torch.device("cuda:0"))
    made = DistributedAMPTrainer(
        model,
        lambda model: torch.optim.AdamW(
            model.parameters(), lr=1e-3, fused=case.fused, foreach=not case.fused
        ),
        distributed=DistributedConfig(
            world_size=world,
            backend="nccl",
            device_ids=(0,),
            num_gpus_per_node=min(world, device.DEVICES),
            num_nodes=max(1, world // device.DEVICES),
        ),
        parallel=parallel,
        fsdp=FSDP(shard=shard),
        amp=AMPConfig(dtype=case.precision),
        clip_norm=1.0 if case.clip else None,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer),
        ema=0.99 if case.ema else None,
    )
    made.names_ended_ranks = False  # The other ranks of a fake group never end.
    made.wrap_model()
    return made


def train(way: str, case: Case) -> dict[str, Any]:
    """Take some steps; return where the results are and what the host has read."""
    with device.fake_tensors() as reads:
        made = trainer(way, case)
        batches = MicroBatches(torch.randint(0, 256, (2, 17)) for _ in range(1 + case.accumulation))
        weights = [3.0, torch.tensor(2.0, device="cuda")][: len(batches)]
        for _ in range(STEPS):
            read = len(reads.devices)
            result = made.training_step(batches, loss, weights, total=100.0)
        devices = {p.device.type for p in made.module.parameters()}
        products = {name for name in reads.operations if name.startswith("mm.")}
        return {
            "products": sorted(products),
            "multiplied": sorted(reads.multiplied),
            "loss": result.loss.device.type,
            "weights": sorted(devices),
            "state": sorted(
                {
                    value.device.type
                    for moments in made.optimizer.state.values()
                    for value in moments.values()
                }
            ),
            "read": reads.devices[read:],
            "skipped": result.skipped,
        }


def answer() -> None:
    """Give the answers of the other ranks: their places, and agreement about the parts that they use."""

    def places(found: list[Any], mine: Any, group: Any = None) -> None:
        found[:] = [divmod(rank, device.DEVICES) for rank in range(len(found))]

    def mesh(*arguments: Any) -> Any:
        # A mesh computes with the numbers of the ranks.
        with _disable_current_modes():
            return made(*arguments)

    made, fsdp.make_mesh = fsdp.make_mesh, mesh
    dist.all_gather_object = places
    # DDP's C++ code would read the shapes of fake tensors, and the values to broadcast.
    DDPStrategy.wrap = wrap
    # numpy cannot take its state back from a fake tensor.
    generators.capture_numpy = lambda: None
    dist._verify_params_across_processes = lambda *_: None
    dist._broadcast_coalesced = lambda *_: None
    fsdp.FSDPStrategy.compare = lambda *_: None
    DistributedAMPTrainer.control_ranks = lambda *_: Ranks()


def wrap(self: DDPStrategy, module: nn.Module, mode: Any) -> nn.Module:
    """Wrap the module, with an all-reduce that waits for nothing: a fake group returns no tensor."""
    wrapped = wrap_plain(self, module, mode)

    def done(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        result: torch.futures.Future[Tensor] = torch.futures.Future()
        result.set_result(bucket.buffer())
        return result

    wrapped.register_comm_hook(None, done)
    wrapped.reducer = _Reducer(wrapped.reducer)
    wrapped.logger = SimpleNamespace(set_runtime_stats_and_log=lambda: None)
    return wrapped


class _Reducer:
    """DDP's reducer in C++, without what reads values: the new order of buckets of all ranks."""

    def __init__(self, reducer: Any) -> None:
        self._reducer = reducer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        return False


class Event:
    """An event of the fake device, which notes if the host has waited for its last record."""

    def __init__(self, place: torch.device) -> None:
        self._event = torch.Event(place)
        self.waited = False

    def record(self, stream: torch.Stream) -> None:
        self._event.record(stream)
        self.waited = False

    def synchronize(self) -> None:
        self._event.synchronize()
        self.waited = True


class HostNumbers:
    """Host memory with the decision of a finite step: fake tensors have no data."""

    def __init__(self, values: Tensor, events: list[Event]) -> None:
        assert values.device.type == "cpu"
        self._values, self._events = values, events

    def copy_(self, found: Tensor, *, non_blocking: bool) -> None:
        self._values.copy_(found, non_blocking=non_blocking)

    def item(self) -> float:
        assert self._events[-1].waited
        return 0.0


def answer_reads() -> None:
    """Give the host the numbers of a finite step, if it waits for the device."""
    events: list[Event] = []
    zeros = accelerator.host_zeros

    def event(place: torch.device) -> Event:
        events.append(Event(place))
        return events[-1]

    seam: Any = accelerator
    seam.event = event
    seam.host_zeros = lambda count, place: HostNumbers(zeros(count, place), events)


def misplaced(optimizer: torch.optim.Optimizer) -> Tensor:
    """Check the gradients as ``gate.not_finite`` does, with the result on the CPU: a mistake on a GPU."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = torch.zeros(())
    torch._amp_foreach_non_finite_check_and_unscale_(
        [p.grad for p in parameters], found, torch.ones((), device="cuda")
    )
    return found


def main() -> None:
    (which,) = sys.argv[1:]
    device.install()
    answer_reads()
    found = gate.not_finite
    for number, (way, (world, _, _)) in enumerate(WAYS.items()):
        gate.not_finite = found
        if world > 1:
            dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world)
            if number == 1:
                answer()
        for case in cases(which):
            report(way, case, planted=False)
        gate.not_finite = misplaced
        last = Case("bf16", clip=False, accumulation=True, ema=False, fused=True)
        report(way, last, planted=True)
        if world > 1:
            dist.destroy_process_group()


def report(way: str, case: Case, *, planted: bool) -> None:
    """Train, and print the result or the error."""
    try:
        told = train(way, case)
    except Exception as error:
        frames = [
            f"{frame.name}:{frame.lineno}" for frame in traceback.extract_tb(error.__traceback__)
        ]
        text = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        told = {"error": f"{text} in {' '.join(frames[-8:])}"}
    print(json.dumps({"way": way, **asdict(case), "planted": planted, **told}), flush=True)


if __name__ == "__main__":
    main()
    leave(
        0
    )  # As a rank. In an interpreter that shuts down, autograd's threads for a device may abort.
