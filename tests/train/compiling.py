"""Program of ``test_compile_cache.py``: a process that compiles a function, with the run's cache file.

``python -m tests.train.compiling FILE`` prints a JSON object: the line of the load, and the
compiler's counters.
"""

import json
import sys
from pathlib import Path

import torch
from torch._dynamo.utils import counters

from hpcrun.train.model.compile_cache import CompileCache


def main(path: Path) -> None:
    cache = CompileCache(path, writes=True, loads=True)
    line = cache.load()
    # Without a gradient or pointwise work the function needs no C++ compiler.
    double = torch.compile(lambda left, right: left @ right)
    with torch.no_grad():
        double(torch.ones(4, 4), torch.ones(4, 4))
    cache.after_step()
    written = path.stat().st_mtime_ns
    cache.save()
    found = {
        "line": line,
        "hits": counters["inductor"]["fxgraph_cache_hit"],
        "misses": counters["inductor"]["fxgraph_cache_miss"],
        "written again": path.stat().st_mtime_ns != written,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
