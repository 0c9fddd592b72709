#!/usr/bin/env python3
"""Collect runs into one HDF5 file: `hpcrun aggregate`.

tools/aggregate.py runs -o results.h5
"""

import sys
from pathlib import Path

# This checkout's modules come before an installed package.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hpcrun.cli.main import main

if __name__ == "__main__":
    main(["aggregate", *sys.argv[1:]])
