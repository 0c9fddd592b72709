"""Keepers of memory for tests: one for each node, and files that a test reads and spoils."""

import contextlib
import os

import torch.distributed as dist

from hpcrun.checkpoint.memory.copies import open_copies
from hpcrun.checkpoint.sharded.engine import CheckpointEngine
from hpcrun.checkpoint.sharded.host_staging import Staging
from hpcrun.ranks.collective import Ranks
from hpcrun.run.memory_keeper import KeeperClient, new_key, start
from hpcrun.storage.retention import Retention, pruning
from hpcrun.storage.store import CheckpointStore

from .rank_folder import not_fenced

RUN = "/runs/a"
FILES = {"rank-00000.bin", "rank-00001.bin", "index.json", "manifest.json"}
"""Files of a snapshot of two ranks."""


@contextlib.contextmanager
def keeper(key=None):
    """Start a keeper, and yield its client and its process, which is ended after the block."""
    key = key or new_key()
    process = start(key)
    try:
        yield KeeperClient(key, RUN), process
    finally:
        process.kill()
        process.communicate()


@contextlib.contextmanager
def keepers(rank, nodes):
    """Start a keeper for each of ``nodes`` on rank 0, and yield the client of this rank."""
    box = [new_key()]
    dist.broadcast_object_list(box, src=0)
    per_node = dist.get_world_size() // nodes
    with contextlib.ExitStack() as stack:
        if rank == 0:
            for node in range(nodes):
                stack.enter_context(keeper(f"{box[0]}/{node}"))
        dist.barrier()
        yield KeeperClient(f"{box[0]}/{rank // per_node}", RUN)
        dist.barrier()


def engine(folder, client, *, peers=False, limit=None, on_host=2, run=RUN, still_mine=not_fenced):
    """Return an engine of the test's ranks that keeps copies with the keeper of ``client``."""
    store = CheckpointStore(folder.root, "7-0", patience=0.5)
    several = folder.world_size > 1
    group = dist.new_group(backend="gloo") if several else None
    ranks = Ranks(folder.rank, folder.world_size, group)
    staging = Staging(limit=limit, ranks_on_host=on_host)
    memory = open_copies(run, ranks, staging, peers=peers, key=client.key)
    return CheckpointEngine(
        store,
        ranks,
        still_mine=still_mine,
        after_commit=pruning(store, Retention(2)),
        memory=memory,
    )


def stored(client):
    """Return the names of the files in memory by step."""
    found = {}
    for file in client.files():
        found.setdefault(file.step, set()).add(file.name)
    return found


@contextlib.contextmanager
def opened(client, name, step=None):
    """Open a file of the keeper for writing; yields its descriptor and its size."""
    files = client.files()
    (file,) = (file for file in files if file.name == name and step in (None, file.step))
    descriptor = client.open(file)
    try:
        yield descriptor, file.size
    finally:
        os.close(descriptor)


def flip(client, name, step=None):
    """Flip a bit in the middle of a file in memory."""
    with opened(client, name, step) as (descriptor, size):
        (byte,) = os.pread(descriptor, 1, size // 2)
        os.pwrite(descriptor, bytes([byte ^ 16]), size // 2)
