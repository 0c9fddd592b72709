"""Print the space on disk of runs, with their checkpoints."""

import argparse

import hpcrun


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("runs", nargs="+", metavar="RUN", help="names or directories of runs")


def run(arguments: argparse.Namespace) -> int:
    """Print a line for each run; hpcrun.open raises UserError for an unknown name, which ends with code 2."""
    for opened in [hpcrun.open(name) for name in arguments.runs]:
        files = [path for path in opened.path.rglob("*") if path.is_file()]
        size = sum(path.stat().st_size for path in files)
        print(f"{opened.name}: {size / 2**20:.1f} MiB in {len(files)} files")
    return 0
