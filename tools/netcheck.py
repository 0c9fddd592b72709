#!/usr/bin/env python3
"""Check the network between the nodes of a job: `hpcrun netcheck`.

salloc --nodes 8 tools/netcheck.py
tools/netcheck.py --local 4 --links
"""

import sys
from pathlib import Path

# This checkout's modules come before an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpcrun.cli.main import main

if __name__ == "__main__":
    main(["netcheck", *sys.argv[1:]])
