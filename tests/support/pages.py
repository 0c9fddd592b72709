"""The examples of the pages in docs."""

import os
import re
from pathlib import Path

PACKAGE = "HPCRUN_TEST_PACKAGE"
"""Variable with the folder of an installed hpcrun that the programs of the pages import."""
ROOT = Path(__file__).resolve().parents[2]


def package() -> str:
    """Return the folder for PYTHONPATH: that of an installed hpcrun, or this checkout."""
    return os.environ.get(PACKAGE) or str(ROOT)


def code_blocks(page: str, language: str) -> list[str]:
    """Return the code blocks of a page in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
