"""Program of ``test_engine.py``: real gloo ranks run all scenarios.

torch is imported once and the ranks are forked from this process, so that all scenarios share one start.
``python -m tests.checkpoint.ranks FOLDER`` writes ``results-WORLD-RANK.json`` into the folder.
"""

import dataclasses
import json
import os
import random
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.node_staging import Stage
from hpcrun.checkpoint.sharded.rank_file import pack
from hpcrun.checkpoint.state.capture import (
    alike,
    apply_rank,
    apply_shared,
    capture_rank,
    capture_shared,
    template,
)
from hpcrun.checkpoint.storage.errors import CheckpointError, ReadFailure
from hpcrun.checkpoint.storage.filesystem import FileSystem
from hpcrun.checkpoint.storage.index import INDEX, Place, decode, encode
from hpcrun.checkpoint.storage.store import CheckpointStore
from hpcrun.run.owner import OwnedByAnotherAttempt
from tests.checkpoint import shared_reading
from tests.train.forks import fork_ranks


class Broken(FileSystem):
    """Fails the call ``name`` on files or folders with ``part`` in their names."""

    def __init__(self, name: str, part: str, code: int = 5) -> None:
        self._what = (name, part, code)
        self._names: dict[int, str] = {}

    def _check(self, name, subject):
        broken, part, code = self._what
        if name == broken and part in subject:
            raise OSError(code, os.strerror(code))

    def create(self, path):
        self._check("create", path.name)
        descriptor = super().create(path)
        self._names[descriptor] = path.name
        return descriptor

    def write(self, descriptor, data):
        self._check("write", self._names[descriptor])
        return super().write(descriptor, data)

    def fsync(self, descriptor):
        self._check("fsync", self._names.get(descriptor, "a folder"))
        super().fsync(descriptor)

    def make_directory(self, path):
        self._check("make_directory", path.name)
        super().make_directory(path)

    def rename(self, source, target):
        self._check("rename", source.name)
        super().rename(source, target)

    def read_into(self, descriptor, view, position):
        self._check("read_into", "any")
        return super().read_into(descriptor, view, position)


class Flipping(FileSystem):
    """Flips a bit of each read from files with ``part`` in their names, like bad memory."""

    def __init__(self, part: str) -> None:
        self._part = part
        self._bad: set[int] = set()

    def open(self, path):
        descriptor = super().open(path)
        if self._part in path.name:
            self._bad.add(descriptor)
        return descriptor

    def read_into(self, descriptor, view, position):
        count = super().read_into(descriptor, view, position)
        if count and descriptor in self._bad:
            view[0] ^= 1
        return count

    def close(self, descriptor):
        self._bad.discard(descriptor)
        super().close(descriptor)


def not_fenced():
    return None


def fenced():
    raise OwnedByAnotherAttempt("7-1 owns this run now; 7-0 stops writing")


def nothing_to_load_into(entries, skeleton):
    return {}


class Ranks:
    """A rank's view: its number, the number of ranks, and the folder of the scenario."""

    def __init__(self, rank, world_size, folder):
        self.rank, self.world_size, self.folder = rank, world_size, folder

    def writer(
        self, fs=None, *, on=0, owner="7-0", still_mine=not_fenced, keep=3, stage=None, group=None
    ):
        """Return an engine with the file system ``fs`` on rank ``on``, and a normal one on other ranks."""
        whole = fs is None or self.rank != on
        store = CheckpointStore(
            self.folder / "checkpoints", owner, fs=FileSystem() if whole else fs, patience=0.5
        )

        def after_commit(step):
            store.prune(keep, protect=[step])
            return []

        return CheckpointEngine(
            store,
            rank=self.rank,
            world_size=self.world_size,
            group=group,
            still_mine=still_mine,
            after_commit=after_commit,
            stage=stage,
        )

    def save(self, writer, step):
        """Save a small state; return the outcome as plain data."""
        shared = {"weights": torch.full((1000,), float(step))}
        outcome = writer.save(step, shared, {"rank": self.rank, "step": step}, {"step": step})
        plain = dataclasses.asdict(outcome)
        for name in ("seconds", "stalled", "waited", "staged"):
            del plain[name]
        return {**plain, "path": outcome.path and outcome.path.name}

    def restore(self, writer):
        """Restore; return step, content and notes as plain data, or the error."""
        try:
            restored = writer.restore(nothing_to_load_into)
        except ReadFailure as error:
            return {"failed": str(error), "here": error.here}
        except CheckpointError as error:
            return {"error": str(error)}
        if restored is None:
            return None
        return {
            "step": restored.step,
            "weight": restored.shared["weights"][0].item(),
            "own": restored.own,
            "meta": restored.meta,
            "notes": restored.notes,
        }

    def spoil(self, step, name):
        """Flip a bit in the middle of a file on rank 0, while other ranks wait."""
        if self.rank == 0:
            path = self.folder / "checkpoints" / f"step-{step:09d}" / name
            raw = bytearray(path.read_bytes())
            raw[len(raw) // 2] ^= 16
            path.write_bytes(raw)
        dist.barrier()

    def names(self):
        """Return the names in the checkpoint folder; all ranks list before any rank continues."""
        dist.barrier()
        found = sorted(entry.name for entry in (self.folder / "checkpoints").iterdir())
        dist.barrier()
        return found


def nothing_yet(ranks):
    return ranks.restore(ranks.writer())


def save_prune_restore(ranks):
    writer = ranks.writer(keep=2)
    outcomes = [ranks.save(writer, step) for step in (1, 2, 3)]
    return outcomes, ranks.names(), ranks.restore(ranks.writer(owner="7-1"))


def training(ranks):
    """Train DDP with dropout: two steps, a save, two more steps; then repeat these from the save."""

    def build(seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        model = DistributedDataParallel(model)
        # DDP changes its buckets after the first backward pass, which changes the order of additions in a
        # ring of more than two ranks: this pass is therefore made before the measured steps.
        model(torch.rand(8, 4)).sum().backward()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        optimizer.zero_grad()
        return model, optimizer

    def steps(model, optimizer):
        for _ in range(2):
            x = torch.rand(8, 4) + random.random()
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def weights(model):
        return [value.tolist() for value in model.state_dict().values()]

    model, optimizer = build(0)
    torch.manual_seed(ranks.rank)
    random.seed(ranks.rank)
    steps(model, optimizer)
    writer = ranks.writer()
    shared = capture_shared(model, optimizer, extra={"step": 2})
    writer.start(2, shared, capture_rank(), {}, alike(model))
    # The write continues during these steps, which change the saved tensors.
    steps(model, optimizer)
    undisturbed = weights(model), torch.rand(1).item()
    saved = writer.wait()[0].ok

    model, optimizer = build(1)
    restored = ranks.writer(owner="7-1").restore(template(model, optimizer))
    apply_shared(restored.shared, model, optimizer)
    apply_rank(restored.own)
    steps(model, optimizer)
    return (
        saved,
        (weights(model), torch.rand(1).item()) == undisturbed,
        sorted(restored.shared["model"]),
    )


def a_disk_fails(ranks, fs, on):
    good = ranks.writer()
    ranks.save(good, 1)
    bad = ranks.writer(fs, on=on)
    failed = ranks.save(bad, 2)
    names = ranks.names()
    again = ranks.save(good, 2)
    return failed, names, again["ok"], ranks.restore(good)["step"]


def one_rank_full(ranks):
    return a_disk_fails(ranks, Broken("write", "rank-00002", 28), on=2)


def two_ranks_fail(ranks):
    ranks.save(ranks.writer(), 1)
    both = Broken("fsync", "rank-")
    return ranks.save(ranks.writer(both, on=ranks.rank if ranks.rank in (1, 3) else 1), 2)


def rank_0_cannot_begin(ranks):
    return a_disk_fails(ranks, Broken("make_directory", ".tmp-", 13), on=0)


def rank_0_cannot_commit(ranks):
    return a_disk_fails(ranks, Broken("rename", ".tmp-"), on=0)


def rank_0_cannot_prune(ranks):
    writer = ranks.writer(Broken("rename", "step-000000001"), keep=1)
    ranks.save(ranks.writer(keep=1), 1)
    return ranks.save(writer, 20), ranks.names()


def state_that_cannot_be_saved(ranks):
    own = {"hook": lambda: None} if ranks.rank == 1 else {}
    outcome = ranks.writer().save(1, {}, own, {})
    return outcome.ok, outcome.error, ranks.names()


def meta_that_cannot_be_saved(ranks):
    outcome = ranks.writer().save(1, {}, {}, {"a": object()})
    return outcome.ok, outcome.error, ranks.names()


def fenced_before_it_begins(ranks):
    return ranks.save(ranks.writer(still_mine=fenced), 1)


def fenced_before_the_commit(ranks):
    calls = []

    def late():
        calls.append(1)
        if len(calls) == 2:
            fenced()

    return ranks.save(ranks.writer(still_mine=late), 1), ranks.names()


def rank_0_stumbles(ranks):
    """An error on rank 0 only: other ranks must receive it, and not wait for the timeout."""

    def stumble():
        raise ZeroDivisionError("a defect")

    return ranks.writer(still_mine=stumble).save(1, {}, {}, {}).error


def the_dead_are_swept(ranks):
    if ranks.rank == 0:
        dead = CheckpointStore(ranks.folder / "checkpoints", "6-0")
        dead.begin(1)
    dist.barrier()
    before = ranks.names()
    ranks.restore(ranks.writer())
    read_only = ranks.names()
    ranks.save(ranks.writer(), 2)
    return before, read_only, ranks.names()


def one_rank_s_file_is_damaged(ranks):
    writer = ranks.writer()
    for step in (1, 2, 3):
        ranks.save(writer, step)
    ranks.spoil(3, "rank-00003.bin")
    ranks.spoil(2, "rank-00000.bin")
    return ranks.restore(ranks.writer(owner="7-1"))


def the_manifest_is_damaged(ranks):
    writer = ranks.writer()
    for step in (1, 2):
        ranks.save(writer, step)
    ranks.spoil(2, "manifest.json")
    return ranks.restore(ranks.writer(owner="7-1"))


def one_rank_cannot_read(ranks):
    for step in (1, 2):
        ranks.save(ranks.writer(), step)
    return ranks.restore(ranks.writer(Broken("read_into", "any"), on=2)), ranks.names()


def one_rank_reads_other_bytes(ranks):
    for step in (1, 2):
        ranks.save(ranks.writer(), step)
    writer = ranks.writer(Flipping("rank-00002"), on=2)
    failed = ranks.restore(writer)
    ranks.save(writer, 3)
    return failed, ranks.names(), ranks.restore(ranks.writer(owner="7-1"))["step"]


def all_are_damaged(ranks):
    writer = ranks.writer()
    for step in (1, 2):
        ranks.save(writer, step)
        ranks.spoil(step, "rank-00000.bin")
    return ranks.restore(ranks.writer(owner="7-1"))


def forge(root):
    """Copy step 1 to step 2 with a function in its plain data, and all hashes correct."""
    store = CheckpointStore(root, "6-6")
    index = decode(store.read(1, INDEX))
    code = pack({"weights": os.getcwd})
    draft = store.begin(2)
    records = []
    for record in store.manifest(1).files:
        content = store.read(1, record.name)
        if record.name == "rank-00000.bin":
            place = Place(record.name, len(content), len(code), xxhash.xxh3_128_hexdigest(code))
            index.blobs["shared"] = place
            content += code
        if record.name == INDEX:
            content = encode(index)
        with store.open_file(draft, record.name) as stream:
            stream.write(content)
        records.append(stream.record)
    store.commit(draft, 2, records, store.manifest(1).world_size, {}, not_fenced)


def code_in_a_checkpoint(ranks):
    """Return bytes that match their hash, and would run code if unpickled without checks."""
    writer = ranks.writer()
    ranks.save(writer, 1)
    if ranks.rank == 0:
        forge(ranks.folder / "checkpoints")
    dist.barrier()
    return ranks.restore(writer)


def a_stage_on_some_nodes(ranks):
    """Give the fast folder to ranks 0 and 3 only."""
    fast = ranks.folder / "fast"
    if ranks.rank == 0:
        fast.mkdir()
    dist.barrier()
    stage = Stage(fast if ranks.rank in (0, 3) else ranks.folder / "missing")
    writer = ranks.writer(stage=stage)
    return ranks.save(writer, 1), ranks.restore(writer), sorted(fast.iterdir())


SCENARIOS = [
    nothing_yet,
    save_prune_restore,
    training,
    one_rank_full,
    two_ranks_fail,
    rank_0_cannot_begin,
    rank_0_cannot_commit,
    rank_0_cannot_prune,
    state_that_cannot_be_saved,
    meta_that_cannot_be_saved,
    fenced_before_it_begins,
    fenced_before_the_commit,
    rank_0_stumbles,
    the_dead_are_swept,
    one_rank_s_file_is_damaged,
    the_manifest_is_damaged,
    one_rank_cannot_read,
    one_rank_reads_other_bytes,
    all_are_damaged,
    code_in_a_checkpoint,
    a_stage_on_some_nodes,
    *shared_reading.SCENARIOS,
]


def fewer_ranks(ranks):
    """Resume on two ranks from a checkpoint of four."""
    saved_by_four = Ranks(ranks.rank, ranks.world_size, ranks.folder.parent / "save_prune_restore")
    writer = saved_by_four.writer(owner="7-2")
    return saved_by_four.restore(writer), ranks.save(writer, 9), saved_by_four.restore(writer)


FEWER = [fewer_ranks, shared_reading.on_fewer_ranks]


def play(scenarios, rank, world_size, folder):
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / f"rendezvous-{world_size}"), world_size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=300)
    )
    results = {}
    for scenario in scenarios:
        place = folder / scenario.__name__
        place.mkdir(exist_ok=True)
        results[scenario.__name__] = scenario(Ranks(rank, world_size, place))
        dist.barrier()
    (folder / f"results-{world_size}-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


def main(folder):
    """Run all scenarios; the exit status is 0 only if every rank succeeds."""
    codes = []
    for scenarios, world_size in ((SCENARIOS, 4), (FEWER, 2)):

        def rank_of(rank, scenarios=scenarios, world_size=world_size):
            play(scenarios, rank, world_size, folder)

        codes += fork_ranks(world_size, rank_of)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
