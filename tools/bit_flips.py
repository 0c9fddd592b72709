#!/usr/bin/env python3
"""Flip single bits in the files of a run, a sweep and its results, and look for silent damage.

Trains a small model on the CPU, interrupted half-way, and a small sweep. For each flip, restores all files,
flips one bit of one file, and does what a user does: resume, status, verify, aggregate, compare. Then
compares weights, settings and values with those of the undamaged files. A difference must come with a
message or a refusal.

    tools/bit_flips.py --flips 300 --seed 1
"""

import argparse
import contextlib
import hashlib
import json
import os
import random
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Each command runs in a fork of this process, so the libraries must start no thread when they are imported.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
# This checkout's modules come before an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import h5py
import torch._dynamo

import hpcrun.results.frames
import hpcrun.train.session
from hpcrun.checkpoint.sharded.rank_file import StoreReader
from hpcrun.cli.main import guarded
from hpcrun.storage.store import CheckpointStore

TASK = '''
"""A small task for tools/bit_flips.py."""

import os

import torch
from torch import nn
from torch.utils.data import TensorDataset

from hpcrun import Task


class Small(Task):
    def build_model(self):
        return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1))

    def train_dataset(self):
        values = torch.randn(64, 8, generator=torch.Generator().manual_seed(1))
        return TensorDataset(values, values.sum(1, keepdim=True))

    validation_dataset = train_dataset

    def loss(self, model, batch):
        if model.training and self.step == 7 and os.environ.get("BIT_FLIPS_STOP"):
            raise ValueError("this failure makes a resume necessary")
        return (model(batch[0]) - batch[1]).square().mean()
'''
SUBMIT = (
    *("submit", "task=small:Small", "--cpu", "train.steps=12", "train.batch_size=8", "train.log_every=1"),
    *("train.validate_every=4", "checkpoint.every=3", "optim.warmup_steps=2"),
)  # fmt: skip
ALONE = ("--executor", "debug", "job.gpus=1", "--name", "one")
SWEEP = ("--executor", "local", "job.gpus=1", "--name", "many", "--sweep", "seed=0:2")
READ = (
    ("status", "--json", "one"),
    ("verify", "one"),
    ("aggregate", "--fresh"),
    ("compare", "results.h5", "--metric", "loss"),
)


class Kind(NamedTuple):
    """A kind of trial: the files before it, the files to flip, the commands, its share of the flips."""

    kept: str
    files: str
    commands: tuple[tuple[str, ...], ...]
    share: int


KINDS = {
    "interrupted": Kind("half", r"runs/one/(?!logs/)", (("resume", "one"), *READ), 45),
    "finished": Kind("whole", r"runs/one/(?!logs/)", READ, 30),
    "results": Kind("whole", r"results\.h5", (("aggregate",), *READ[3:]), 12),
    "sweep": Kind(
        "whole",
        r"runs/many/sweep\.json",
        (("status", "--json", "many"), (*SUBMIT, *SWEEP, "--dry-run"), ("aggregate", "--fresh")),
        8,
    ),
    "logs": Kind("half", r"runs/one/logs/", (("resume", "one"), *READ), 5),
}
PLAIN = re.compile(
    r"^(identity\.|event\.|result\.(reason|time|goodput)|run\.(created|ended|reason))"
)
"""Facts that are no weight, setting or value: records of times and places, and texts."""
MEASURED = re.compile(
    r"^run\.bytes|^metric\.(memory|step_time|data_time|\w+_per_s|\w*_s$|mfu|tflops|time)"
)
"""Values that differ between two equal trainings."""
SAYS = re.compile(
    r"damaged|checksum|cannot|refus|is no |missing|torn| -> |invalid|changed|must |no such|unknown|not a "
    r"|restore |error|needs|expected|gone|unreadable|problem",
    re.IGNORECASE,
)


class Outcome(NamedTuple):
    """Exit codes of the commands, lines of all output, and facts: weights, settings and values by name."""

    codes: list[int]
    lines: list[str]
    facts: dict[str, str]


def in_fork(work: Path, function: Any) -> Any:
    """Return the JSON value of ``function()``, called in a fork in the folder ``work``; None if it died."""
    answer = work.parent / "answer.json"
    answer.unlink(missing_ok=True)
    sys.stdout.flush()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.chdir(work)
            answer.write_text(json.dumps(function()))
            code = 0
        finally:
            os._exit(code)
    os.waitpid(child, 0)
    return json.loads(answer.read_text()) if answer.exists() else None


def command(work: Path, arguments: Sequence[str]) -> tuple[int, str]:
    """Run an hpcrun command in a fork; return its exit code and its output."""
    output = work.parent / "output"

    def play() -> int:
        with output.open("w") as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        try:
            return guarded(list(arguments))
        except BaseException:
            import traceback

            traceback.print_exc()
            raise

    code = in_fork(work, play)
    return -1 if code is None else code, output.read_text(errors="replace")


def facts(work: Path) -> dict[str, str]:
    """Return the weights of the newest checkpoint, the settings and the values in the results."""
    found = dict(_weights(work / "runs" / "one" / "checkpoints"))
    with contextlib.suppress(Exception):
        found |= dict(_results(work / "results.h5"))
    return found


def _weights(folder: Path) -> Iterator[tuple[str, str]]:
    store = CheckpointStore(folder, "bit-flips")
    for step in store.steps()[:1]:
        reader = StoreReader(store, step)
        tensors = {name: reader.empty(name) for name in reader.index.tensors}
        try:
            reader.load(tensors)
        except Exception as error:
            yield "weights", f"unreadable: {type(error).__name__}"
            return
        digest = hashlib.sha256(str(step).encode())
        for name, tensor in sorted(tensors.items()):
            digest.update(
                name.encode() + tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            )
        yield "weights", digest.hexdigest()


def _results(path: Path) -> Iterator[tuple[str, str]]:
    results = hpcrun.results.frames.load_results(path)
    runs = results.runs()
    for row in runs.to_dict("records"):
        for key, value in row.items():
            prefix = "" if str(key).startswith(("run.", "identity.")) else "run."
            yield f"{prefix}{key} of {row['run']}", repr(value)
        for key, value in _flat(results.result(row["run"]), "result."):
            yield f"{key} of {row['run']}", repr(value)
    for name, table in (("metric", results.metrics()), ("event", results.events())):
        for number, row in enumerate(table.to_dict("records")):
            for key, value in row.items():
                yield f"{name}.{key}[{number}]", repr(value)
    with h5py.File(path) as file:
        documents: list[tuple[str, str]] = []
        file.visititems(
            lambda name, item: (
                documents.append((name, str(item[()])))
                if isinstance(item, h5py.Dataset) and item.shape == () and name.endswith("identity")
                else None
            )
        )
    yield from ((f"identity.{name}", value) for name, value in documents)


def _flat(value: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _flat(
                item, f"{prefix}{key}." if isinstance(item, dict) else f"{prefix}{key}"
            )
    else:
        yield prefix, value


def trial(work: Path, kind: Kind) -> Outcome:
    """Do the commands of ``kind`` in ``work``."""
    codes, lines = [], []
    for arguments in kind.commands:
        code, text = command(work, arguments)
        codes.append(code)
        lines += text.splitlines()
    return Outcome(codes, lines, in_fork(work, lambda: facts(work)) or {})


def restore(work: Path, kept: Path) -> None:
    """Make ``work`` equal to ``kept``."""
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(kept, work, symlinks=True)


def without_numbers(line: str) -> str:
    """Return a line of output that two equal runs share."""
    return re.sub(r"[\d.,:e+-]+", "0", line)


def judge(
    kind: Kind, outcome: Outcome, first: Outcome, second: Outcome, name: str
) -> tuple[str, str]:
    """Return the verdict about a trial, and the reason; ``first`` and ``second`` had undamaged files."""
    usual = {without_numbers(line) for line in [*first.lines, *second.lines]}
    new = [line for line in outcome.lines if without_numbers(line) not in usual]
    told = [line for line in new if SAYS.search(line) or Path(name).name in line]
    if any("Traceback" in line for line in new) or -1 in outcome.codes:
        return "TRACEBACK", new[-1] if new else "no output"
    stable = {key for key, value in first.facts.items() if second.facts.get(key) == value}
    if kind.kept == "half":
        stable = {key for key in stable if not MEASURED.match(key)}
    changed = (key for key in stable if outcome.facts.get(key) != first.facts[key])
    other = sorted(changed, key=lambda key: (bool(PLAIN.match(key)), key))
    shown = "; ".join(f"{key}: {first.facts[key]} -> {outcome.facts.get(key)}" for key in other[:3])
    if outcome.codes != first.codes and told:
        return "refused", told[0]
    if told:
        return "named", told[0]
    if any(not PLAIN.match(key) for key in other):
        return "SILENT", shown
    return ("text only", shown) if other else ("same", "")


def prepare(folder: Path) -> Path:
    """Train a run, half and whole, and a sweep; return the folder in which all trials take place."""
    work = folder / "work"
    work.mkdir()
    (work / "small.py").write_text(TASK)
    os.environ["BIT_FLIPS_STOP"] = "1"
    stopped = command(work, (*SUBMIT, *ALONE))
    del os.environ["BIT_FLIPS_STOP"]
    shutil.copytree(work, folder / "half", symlinks=True)
    for arguments in (("resume", "one"), (*SUBMIT, *SWEEP), ("aggregate",)):
        while arguments == ("aggregate",) and len([*work.glob("runs/many/*/result.json")]) < 2:
            time.sleep(0.2)
        code, text = command(work, arguments)
        if code or not stopped[0]:
            raise SystemExit(
                f"bit_flips: {' '.join(arguments)}: exit code {code}\n{stopped[1]}\n{text}"
            )
    # The controllers of the sweep end a little later.
    time.sleep(2)
    shutil.copytree(work, folder / "whole", symlinks=True, ignore=shutil.ignore_patterns("*.tmp"))
    return work


def flip(work: Path, kind: Kind, dice: random.Random) -> str:
    """Flip a bit of a file of ``kind``, and return its place."""
    names = sorted(
        str(path.relative_to(work))
        for path in work.rglob("*")
        if path.is_file() and not path.is_symlink() and path.stat().st_size
    )
    name = dice.choice([name for name in names if re.match(kind.files, name)])
    path = work / name
    content = bytearray(path.read_bytes())
    bit = dice.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    mode = path.stat().st_mode
    path.chmod(mode | 0o200)
    path.write_bytes(content)
    path.chmod(mode)
    return f"{name} bit {bit}"


def main() -> int:
    """Flip bits; return 0 if no damage was silent."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--flips", type=int, default=300, metavar="N", help="default 300")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="seed of the flips")
    parser.add_argument("--only", choices=KINDS, help="flip only files of this kind")
    wanted = parser.parse_args()
    dice = random.Random(wanted.seed)
    counts: Counter[tuple[str, str]] = Counter()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bit-flips-") as name:
        work = prepare(Path(name))
        print(f"prepared in {time.monotonic() - began:.0f} s", flush=True)
        usual: dict[str, tuple[Outcome, Outcome]] = {}
        for number in range(wanted.flips):
            (choice,) = dice.choices([*KINDS], [kind.share for kind in KINDS.values()])
            choice = wanted.only or choice
            kind = KINDS[choice]
            while choice not in usual or len(usual[choice]) < 2:
                restore(work, work.parent / kind.kept)
                usual[choice] = (*usual.get(choice, ()), trial(work, kind))  # type: ignore[assignment]
            restore(work, work.parent / kind.kept)
            place = flip(work, kind, dice)
            verdict, why = judge(kind, trial(work, kind), *usual[choice], place.split()[0])
            counts[choice, verdict] += 1
            print(f"{number + 1:4} {choice:<12} {verdict:<10} {place}: {why[:200]}", flush=True)
    for (choice, verdict), count in sorted(counts.items()):
        print(f"{choice:<12} {verdict:<10} {count}")
    failed = sum(count for (_, verdict), count in counts.items() if verdict.isupper())
    print(
        f"seed {wanted.seed}: {wanted.flips} flips, {failed} failures, {time.monotonic() - began:.0f} s"
    )
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
