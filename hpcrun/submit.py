"""``python -m hpcrun.submit``: the same as ``hpcrun submit``."""

import sys

from hpcrun.cli.main import main

if __name__ == "__main__":
    main(["submit", *sys.argv[1:]])
