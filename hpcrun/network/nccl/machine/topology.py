"""A parser of the matrix that ``nvidia-smi topo -m`` prints."""

import re

_LINK = re.compile(r"X|SYS|NODE|PHB|PXB|PIX|NV\d+")
_ESCAPES = re.compile(r"\x1b\[[0-9;]*m")


def gpu_links(text: str) -> tuple[str, ...]:
    """Return the kinds of link between the GPUs (``NV18``, ``PIX``, ``SYS``), each once, sorted.

    Empty for a single GPU and for a text that is not the matrix.
    """
    lines = [_ESCAPES.sub("", line) for line in text.splitlines()]
    header = next((line.split() for line in lines if "GPU0" in line.split()[:2]), [])
    columns = [name for name in header if re.fullmatch(r"GPU\d+", name)]
    found: set[str] = set()
    for line in lines:
        words = line.split()
        if words and words[0] in columns and len(words) > len(columns):
            cells = words[1 : 1 + len(columns)]
            if all(_LINK.fullmatch(cell) for cell in cells):
                found.update(cell for cell in cells if cell != "X")
    return tuple(sorted(found))
