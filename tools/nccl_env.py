#!/usr/bin/env python3
"""Print the NCCL environment that this node needs, each line with its reason: `hpcrun nccl advise`.

eval "$(tools/nccl_env.py)"
"""

import sys
from pathlib import Path

# This checkout's modules come before an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpcrun.cli.main import main

if __name__ == "__main__":
    main(["nccl", "advise", *sys.argv[1:]])
