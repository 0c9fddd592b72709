#!/usr/bin/env python3
"""Count the graphs that torch.compile makes of a model under DDP: of the whole model, and of each block.

    tools/bench/graphs.py [--layers 20]

The buckets are as many as those of 1.3 billion parameters: 208, unless they would be smaller than 1 MiB. No
compiler gets the graphs, so the counts take seconds.
"""

import argparse
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from hpcrun.config.tasks.language_model import LanguageModelShape
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.tasks.llama import Llama
from hpcrun.train.parallel.strategies import DDPStrategy

BUCKETS = 208


def count(layers: int, *, blocks: bool) -> int:
    """Return the number of graphs of a forward and a backward pass."""
    torch._dynamo.reset()
    graphs: list[Any] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    model = Llama(LanguageModelShape(layers=layers, heads=4, width=512, context=64))
    bucket = max(1.0, sum(p.nbytes for p in model.parameters()) / 2**20 / BUCKETS)
    original = nn.Module.compile
    compiling: Any = nn.Module
    compiling.compile = lambda part, **_: original(part, backend=backend)
    try:
        if blocks:
            wrapped = DDPStrategy(DistributedConfig(bucket_mb=bucket)).wrap(model, "default")
        else:
            wrapped = DistributedDataParallel(model, bucket_cap_mb=bucket)
            wrapped.compile()
    finally:
        compiling.compile = original
    tokens = torch.randint(0, 256, (2, 65))
    wrapped(tokens[:, :-1], tokens[:, 1:]).backward()
    return len(graphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=20, help="layers (20)")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1
        )
        # The strategy switches the division at buckets off for the whole process.
        for name, blocks in (("the whole model", False), ("each block", True)):
            print(f"{name}: {count(given.layers, blocks=blocks)} graphs", flush=True)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
