"""Program of ``test_gradients.py``: two gloo ranks with bad gradients and with compressed gradients.

``python -m tests.train.gradients FOLDER`` writes ``results-RANK.json`` into the folder.
"""

import hashlib
import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch._dynamo  # DDP would import it after the fork
import torch.distributed as dist
from torch import nn

from hpcrun.cluster.distributed import DistributedConfig
from hpcrun.config import AMPConfig, override_layer, resolve
from hpcrun.run.directory import RunDirectory
from hpcrun.run.events import Attempt
from hpcrun.train.errors import PeerFailed
from hpcrun.train.health.nonfinite import NonFiniteWatch, NotFinite
from hpcrun.train.parallel.gradient_compression import compression
from hpcrun.train.step.gate import StepGate
from hpcrun.train.step.trainer import DistributedAMPTrainer
from tests.train.forks import fork_ranks
from tests.train.nccl_rules import nccl_rules
from tests.train.sharing import Net, loss

FP16 = AMPConfig(dtype="fp16", init_scale=1024.0, growth_interval=3)


class Wide(nn.Module):
    """A model of matrices worth compressing, in several DDP buckets (the first holds 1 MiB)."""

    def __init__(self):
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 512), nn.Linear(512, 1)
        self.middle, self.other = nn.Linear(512, 512), nn.Linear(512, 512)

    def forward(self, x):
        x = self.middle(self.enter(x).tanh()).tanh()
        return self.leave(self.other(x).tanh())


def fused_adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)


def trainer(rank, parallel="ddp", *, make=Net, gradients=None, **options):
    torch.manual_seed(0)
    made = DistributedAMPTrainer(
        make(),
        fused_adamw,
        distributed=DistributedConfig(
            world_size=2, rank=rank, local_rank=rank, num_gpus_per_node=2
        ),
        device="cpu",
        parallel=parallel,
        compression=compression(*gradients[:1], **gradients[1]) if gradients else None,
        scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 0.9**s),
        **options,
    )
    made.wrap_model()
    return made


def batches(rank, count):
    """Return ``count`` steps of a micro-batch of eight samples, different on each rank."""
    generator = torch.Generator().manual_seed(10 + rank)
    for _ in range(count):
        inputs = torch.randn(8, 6, generator=generator)
        yield [(inputs, inputs.sin().sum(1))]


def spoiled(model, batch):
    """A loss that is NaN on rank 1."""
    return loss(model, batch) * (torch.nan if dist.get_rank() == 1 else 1.0)


def overflowing(model, batch):
    """Make a row of a layer's gradient infinite on rank 1; under FSDP a single rank holds this row."""
    layer = model.module.enter if hasattr(model, "module") else model.enter

    def one_is_infinite(gradient):
        spike = torch.zeros_like(gradient)
        spike[0, 0] = torch.inf
        return gradient + spike

    def spoil(_, inputs, output):
        if dist.get_rank() == 1:
            output.register_hook(one_is_infinite)

    hook = layer.register_forward_hook(spoil)
    value = loss(model, batch)
    hook.remove()
    return value


def digest(made):
    """Return this rank's part of the weights and of the optimizer state."""
    state = made.optimizer.state_dict()["state"]
    tensors = [*made.module.parameters(), *(v for s in state.values() for v in s.values())]
    local = (t.to_local() if hasattr(t, "to_local") else t for t in tensors)
    joined = b"".join(t.detach().contiguous().numpy().tobytes() for t in local)
    return hashlib.sha256(joined).hexdigest()


def bad_gradients(rank, folder):
    """Take five steps, the second bad, with every parallelism, policy and clipping."""
    found = {}
    for parallel in ("ddp", "fsdp"):
        for name, bad, amp in (
            ("nan", spoiled, AMPConfig()),
            ("overflow", overflowing, AMPConfig()),
            ("overflow-fp16", overflowing, FP16),
        ):
            for clip in (None, 0.5):
                for late in (frozenset({"cuda"}), frozenset({"cpu"})):
                    StepGate.late_on = late
                    made = trainer(rank, parallel, amp=amp, clip_norm=clip)
                    data = list(batches(rank, 5))
                    made.training_step(data[0], loss)
                    before = digest(made)
                    result = made.training_step(data[1], bad)
                    skipped, kept = result.skipped, digest(made) == before
                    rates = [made.training_step(step, loss).learning_rate for step in data[2:]]
                    made.gate.settle()
                    finite = all(p.isfinite().all() for p in made.module.parameters())
                    found[
                        f"{parallel} {name} {clip} {'late' if late == {'cpu'} else 'at once'}"
                    ] = {
                        "skipped": [skipped, made.gate.skipped, made.gate.steps],
                        "kept": kept,
                        "rates": [round(rate, 6) for rate in rates],
                        "finite": bool(finite),
                        "scales": list(made.gate.scales),
                        "digest": digest(made),
                    }
    StepGate.late_on = frozenset({"cuda"})
    return found


def bad_losses_under_fp16(rank, folder):
    """Give an overflow, and later a NaN loss on rank 1; return when and why each rank stops."""
    config = resolve([override_layer(["train.nonfinite=stop", "amp.dtype=fp16"])])
    found = []
    for late in (frozenset({"cuda"}), frozenset({"cpu"})):
        StepGate.late_on = late
        made = trainer(rank, amp=FP16)
        group, run = made.control_group(), RunDirectory(folder)
        watch = NonFiniteWatch(
            run, Attempt("7", 0), config, made, start=0, rank=rank, group=group, samples=None
        )
        try:
            for number, step in enumerate(batches(rank, 4)):
                bad = {1: overflowing, 3: spoiled}.get(number, loss)
                watch.check(made.training_step(step, bad))
            watch.finish()
        except (NotFinite, PeerFailed) as error:
            found.append([type(error).__name__, str(error)])
        dist.barrier()  # Rank 0 writes, but rank 1 would not wait.
        found[-1].append([path.name for path in (folder / "nonfinite").iterdir()])
    StepGate.late_on = frozenset({"cuda"})
    return found


def whole(made):
    return torch.cat([p.detach().flatten() for p in made.module.parameters()])


def compressed(rank, folder):
    """Take ten steps with each compression; return the distance to no compression and between ranks."""
    ends = {}
    for kind, amp in (
        ("none", AMPConfig()),
        ("fp16", AMPConfig()),
        ("bf16", AMPConfig()),
        ("powersgd", AMPConfig()),
        ("powersgd", FP16),
    ):
        chosen = None if kind == "none" else (kind, {"rank": 2, "start": 3})
        made = trainer(rank, make=Wide, gradients=chosen, amp=amp, clip_norm=1.0)
        losses = [made.training_step(step, loss).loss.item() for step in batches(rank, 10)]
        ends[f"{kind} {amp.dtype}"] = made, losses
    plain = whole(ends["none fp32"][0])
    return {
        name: {
            "losses": losses,
            "away": (whole(made) - plain).norm().item() / plain.norm().item(),
            "digest": digest(made),
        }
        for name, (made, losses) in ends.items()
    }


def powersgd_resumes(rank, folder):
    """Take nine steps, and five, a save and four in a new trainer, with a loss scale that grows."""
    found = {}
    for name, amp in (("fp32", AMPConfig()), ("fp16", FP16)):

        def begin(rank_of=2, amp=amp):
            chosen = ("powersgd", {"rank": rank_of, "start": 2})
            return trainer(rank, make=Wide, gradients=chosen, amp=amp)

        calm, data = begin(), list(batches(rank, 9))
        for number, step in enumerate(data):
            calm.training_step(step, loss)
            if number == 4:
                calm.save_checkpoint(folder / name, 5)
        again = begin()
        restored = again.load_checkpoint(folder / name)
        without = begin(rank_of=3)
        told = without.load_checkpoint(folder / name).notes
        for step in data[5:]:
            again.training_step(step, loss)
            without.training_step(step, loss)
        found[name] = {
            "same": digest(again) == digest(calm),
            "notes": restored.notes,
            "told": told,
            "otherwise": digest(without) == digest(calm),
            "scales": list(calm.gate.scales),
        }
    return found


def powersgd_after_a_bad_step(rank, folder):
    """Check that error feedback drops values that are not finite, and buckets of another size."""
    made = trainer(rank, make=Wide, gradients=("powersgd", {"rank": 2, "start": 2}))
    data = list(batches(rank, 8))
    for number, step in enumerate(data):
        made.training_step(step, spoiled if number == 4 else loss)
    skipped = made.gate.skipped
    errors = made._compression._state.error_dict
    errors[0] = errors[0][:-1].clone()
    last = made.training_step(data[0], loss).skipped
    return {"skipped": [skipped, last], "digest": digest(made)}


SCENARIOS = [
    bad_gradients,
    bad_losses_under_fp16,
    compressed,
    powersgd_resumes,
    powersgd_after_a_bad_step,
]


def play(rank, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "rendezvous"), 2)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=300)
    )
    results = {}
    with nccl_rules():
        for scenario in SCENARIOS:
            place = folder / scenario.__name__
            place.mkdir(exist_ok=True)
            results[scenario.__name__] = scenario(rank, place)
            dist.barrier()
    (folder / f"results-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main(folder):
    return int(any(fork_ranks(2, lambda rank: play(rank, folder))))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
