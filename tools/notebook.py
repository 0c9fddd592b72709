#!/usr/bin/env python3
"""Execute docs/example.ipynb and store its outputs: tools/notebook.py [NOTEBOOK]

The notebook runs in a temporary folder. Run this after every change of a code cell.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "docs" / "example.ipynb"
SECONDS = 300


def execute(path: Path, folder: Path) -> nbformat.NotebookNode:
    """Return the notebook ``path`` with the outputs of a run in ``folder``.

    Raises:
        CellExecutionError: a cell has raised an exception.
    """
    notebook = nbformat.read(path, as_version=4)
    # A cell calls the program `hpcrun` of this environment.
    programs = str(Path(sys.executable).parent)
    paths = {
        "PATH": os.pathsep.join([programs, os.environ.get("PATH", "")]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    client = NotebookClient(
        notebook,
        timeout=SECONDS,
        kernel_name="python3",
        record_timing=False,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute(env=os.environ | paths)
    return notebook


def main(path: Path) -> None:
    """Execute the notebook and replace it by its executed form."""
    with tempfile.TemporaryDirectory() as folder:
        notebook = execute(path, Path(folder))
    nbformat.write(notebook, path)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else EXAMPLE)
