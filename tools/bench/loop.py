#!/usr/bin/env python3
"""Time per step of a bare PyTorch loop, and of hpcrun, Accelerate and Lightning around the same model.

Every loop runs in a separate process with one thread. The loops take turns in one run: a block of
steps each, round after round, so that other work on the machine affects all of them. The memory layout
of a process makes it some percent faster or slower, so every loop is started several
times. The ratio to the bare loop is the median over all rounds of the ratio within a round,
by wall clock and by CPU time, which other work disturbs less. For the MLP, "us" is the time of a step
beyond that of the bare loop, from the fastest ten steps of each block, which other work hardly disturbs.
The bare loop runs twice: the difference of the two is noise, and the other figures have the same noise.

All loops train the same model on the same in-memory dataset (except hpcrun through a DataLoader), with a
schedule, clipping to the same norm and the same AdamW, without weight decay for vectors as in hpcrun
(two parameter groups). hpcrun has its defaults (a line of metrics every 10 steps, stop
agreement, watchdog, deterministic kernels), and so have the others (progress bar, loggers). No loop saves a
checkpoint.

    pip install accelerate lightning                 # missing packages are skipped
    tools/bench/loop.py --starts 5 --rounds 10
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false")

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.tasks.llama import Llama
from hpcrun.train.task import Task

LOOPS = ("bare", "bare again", "hpcrun", "accelerate", "lightning")
LEARNING_RATE, WARMUP, CLIP = 1e-3, 10, 1.0
TURNS = "HPCRUN_BENCH_TURNS"


Spent = tuple[float, float, float]
"""Seconds by the wall clock, by the processors of a process, and of the fastest ten steps."""

TEN = 10
"""Steps between two lines of hpcrun's metrics. Ten steps of the MLP are often undisturbed."""


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


class Turns:
    """This process's end of the pipes: reports the time of a block and waits for the next turn."""

    def __init__(self, block: int) -> None:
        said = os.environ[TURNS].split(",")
        self._go, self._told = int(said[0]), int(said[1])
        self._block, self._fetched, self._since = block, 0, clocks()
        self._marks: list[float] = []

    def fetch(self) -> None:
        """Count a fetched batch; at the end of a block, wait for the next turn."""
        if self._fetched % TEN == 0:
            self._marks.append(time.perf_counter())
        if self._fetched % self._block == 0:
            wall, processor = (now - then for now, then in zip(clocks(), self._since, strict=True))
            ten = min((b - a for a, b in pairwise(self._marks)), default=0.0)
            os.write(self._told, f"{wall} {processor} {ten}\n".encode())
            if os.read(self._go, 1) != b"g":
                os._exit(0)
            self._since = clocks()
            self._marks = [self._since[0]]
        self._fetched += 1


class Samples(Dataset[Any]):
    """Samples in memory; the first of each ``batch`` requested samples starts a step."""

    def __init__(self, inputs: torch.Tensor, targets: torch.Tensor, batch: int, block: int) -> None:
        self._inputs, self._targets, self._batch = inputs, targets, batch
        self._turns, self._asked = Turns(block), 0

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self._asked % self._batch == 0:
            self._turns.fetch()
        self._asked += 1
        return self._inputs[index], self._targets[index]


class Mlp:
    """Two hidden layers of 128, batches of 32: a step has a few dozen small kernels."""

    name, batch, block = "tiny MLP", 32, 200

    @staticmethod
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)
        )

    @classmethod
    def samples(cls) -> Samples:
        made = torch.Generator().manual_seed(0)
        inputs = torch.randn(4096, 64, generator=made)
        targets = torch.randint(0, 10, (4096,), generator=made)
        return Samples(inputs, targets, cls.batch, cls.block)

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])


class SmallGpt:
    """Four layers of width 128 over 128 bytes, batches of 8."""

    name, batch, block = "small GPT", 8, 10

    @staticmethod
    def model() -> nn.Module:
        return Llama(LanguageModelShape(layers=4, heads=4, width=128, context=128))

    @classmethod
    def samples(cls) -> Samples:
        text = torch.randint(0, 256, (512, 129), generator=torch.Generator().manual_seed(0))
        return Samples(text[:, :-1], text[:, 1:], cls.batch, cls.block)

    @staticmethod
    def loss(model: nn.Module, batch: Any) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


PROBLEMS: dict[str, type[Mlp] | type[SmallGpt]] = {"mlp": Mlp, "gpt": SmallGpt}


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)


def schedule_of(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / WARMUP))


def loader_of(problem: type[Mlp] | type[SmallGpt]) -> "DataLoader[Any]":
    return DataLoader(problem.samples(), batch_size=problem.batch, shuffle=True, drop_last=True)


def bare(problem: type[Mlp] | type[SmallGpt]) -> None:
    """Run a minimal PyTorch loop."""
    model, loader = problem.model(), loader_of(problem)
    optimizer = optimizer_of(model)
    schedule = schedule_of(optimizer)
    while True:
        for batch in loader:
            loss = problem.loss(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            schedule.step()


def accelerate(problem: type[Mlp] | type[SmallGpt]) -> None:
    """Run the loop of Accelerate's quick tour."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = problem.model()
    optimizer = optimizer_of(model)
    model, optimizer, loader, schedule = accelerator.prepare(
        model, optimizer, loader_of(problem), schedule_of(optimizer)
    )
    while True:
        for batch in loader:
            with accelerator.accumulate(model):
                loss = problem.loss(model, batch)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), CLIP)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


def lightning(problem: type[Mlp] | type[SmallGpt]) -> None:
    """Run a module with the same parts in Lightning's trainer, with its defaults but no checkpoints."""
    import lightning.pytorch as pl

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = problem.model()

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            loss = problem.loss(self.model, batch)
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> Any:
            optimizer = optimizer_of(self.model)
            every_step = {"scheduler": schedule_of(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": every_step}

    with tempfile.TemporaryDirectory() as folder:
        trainer = pl.Trainer(
            max_steps=10**9, accelerator="cpu", devices=1, gradient_clip_val=CLIP,
            enable_checkpointing=False, default_root_dir=folder,
        )  # fmt: skip
        trainer.fit(Module(), loader_of(problem))


def hpcrun(problem: type[Mlp] | type[SmallGpt]) -> None:
    """Run a rank of a run as any launcher starts it, with a task for the problem."""
    from hpcrun.config import override_layer, resolve, to_yaml
    from hpcrun.ranks.signals import STOP
    from hpcrun.run.directory import create
    from hpcrun.worker import run_rank

    task = {Mlp: "MlpTask", SmallGpt: "SmallGptTask"}[problem]
    config = resolve(
        [
            override_layer(
                [
                    f"task=__main__:{task}", "job.cpu=true", "train.steps=1000000000",
                    f"train.batch_size={problem.batch}", f"train.lr={LEARNING_RATE}",
                    f"train.clip_norm={CLIP}", f"optim.warmup_steps={WARMUP}",
                    "optim.schedule=constant", "checkpoint.every=0",
                ]
            )
        ]
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        run = create(Path(folder) / "run", to_yaml(config), {"folder": folder})
        STOP.install()
        sys.exit(run_rank(run.path, STOP))


class MlpTask(Task):
    """The MLP as a task."""

    problem: Any = Mlp

    def build_model(self) -> nn.Module:
        return self.problem.model()

    def train_dataset(self) -> Samples:
        return self.problem.samples()

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        return self.problem.loss(model, batch)


class SmallGptTask(MlpTask):
    """The GPT as a task."""

    problem = SmallGpt


class Child:
    """One loop in its own process, paused until its turn."""

    def __init__(self, loop: str, problem: str) -> None:
        go_read, self._go = os.pipe()
        told, told_write = os.pipe()
        self._told = os.fdopen(told)
        environ = os.environ | {TURNS: f"{go_read},{told_write}"}
        self.process = subprocess.Popen(
            [sys.executable, __file__, "--child", loop, "--only", problem],
            pass_fds=(go_read, told_write), env=environ,
            stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip
        os.close(go_read)
        os.close(told_write)
        self._await(loop)

    def _await(self, loop: str) -> Spent:
        line = self._told.readline()
        if not line:
            words = self.process.communicate()[1].decode(errors="replace")
            raise SystemExit(f"loop: {loop} ended: {words.strip()[-2000:]}")
        wall, processor, ten = map(float, line.split())
        return wall, processor, ten

    def turn(self) -> Spent:
        """Return the time of one block of steps."""
        os.write(self._go, b"g")
        return self._await("a loop")

    def end(self) -> None:
        os.close(self._go)
        self.process.terminate()
        self.process.communicate()


def measure(problem: str, loops: list[str], starts: int, rounds: int) -> dict[str, list[Spent]]:
    """Return the step times of each loop by round, from ``starts`` processes per loop."""
    taken: dict[str, list[Spent]] = {loop: [] for loop in loops}
    for start in range(starts):
        children = {loop: Child(loop, problem) for loop in loops}
        try:
            # Drop the first rounds, the warm-up.
            for number in range(-2, rounds):
                # Change the order, so that no loop always runs after the slowest loop.
                first = (start + number) % len(loops)
                for loop in loops[first:] + loops[:first]:
                    spent = children[loop].turn()
                    if number >= 0:
                        taken[loop].append(spent)
        finally:
            for child in children.values():
                child.end()
    steps = PROBLEMS[problem].block
    return {
        loop: [(w / steps, p / steps, ten / TEN) for w, p, ten in spent]
        for loop, spent in taken.items()
    }


def summary(taken: list[Spent], bare: list[Spent]) -> dict[str, float]:
    """Return medians: milliseconds per step, and the ratios to the bare loop by both clocks.

    ``more_microseconds`` compares the tenth percentile of the fastest ten steps of each block.
    """
    wall, processor = (
        statistics.median(mine[clock] / base[clock] for mine, base in zip(taken, bare, strict=True))
        for clock in (0, 1)
    )
    ms = 1000 * statistics.median(wall for wall, _, _ in taken)
    tens, base = (
        sorted(ten for _, _, ten in blocks)[len(blocks) // 10] for blocks in (taken, bare)
    )
    return {
        "ms": ms,
        "ratio": wall,
        "processor_ratio": processor,
        "more_microseconds": 1e6 * (tens - base),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--starts", type=int, default=5, metavar="N", help="processes per loop (default 5)"
    )
    parser.add_argument(
        "--rounds", type=int, default=10, metavar="N", help="rounds per process (default 10)"
    )
    parser.add_argument("--only", choices=sorted(PROBLEMS), help="one of the two models")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    parser.add_argument("--child", choices=LOOPS, help=argparse.SUPPRESS)
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    if wanted.child:
        globals()[wanted.child.removesuffix(" again")](PROBLEMS[wanted.only])
        return 0
    missing = [name for name in ("accelerate", "lightning") if find_spec(name) is None]
    if missing:
        print(f"left out: {', '.join(missing)}; pip install {' '.join(missing)}", file=sys.stderr)
    loops = [loop for loop in LOOPS if loop not in missing]
    results = {}
    for problem in [wanted.only] if wanted.only else list(PROBLEMS):
        taken = measure(problem, loops, wanted.starts, wanted.rounds)
        results[problem] = {loop: summary(spent, taken["bare"]) for loop, spent in taken.items()}
    if wanted.json:
        print(json.dumps(results, indent=2))
        return 0
    print("| | " + " | ".join(PROBLEMS[problem].name for problem in results) + " |")
    print("|---|" + "---|" * len(results))
    for loop in loops:
        cells = [
            "{ms:.3f} ms, {ratio:.2f} x, processor {processor_ratio:.2f} x".format(**result[loop])
            + (
                f", {result[loop]['more_microseconds']:+.0f} us"
                if PROBLEMS[problem].block > TEN
                else ""
            )
            for problem, result in results.items()
        ]
        print(f"| {loop} | " + " | ".join(cells) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
