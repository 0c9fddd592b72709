"""Find out from the source of a Python script if its copies can divide work: if it knows of ranks.

The answer errs towards yes: a wrong warning costs more than a missing one.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrun.job.script.command import is_python, script_of

_MOST_FILES, _MOST_BYTES = 300, 1 << 20
_KNOWS = re.compile(
    r"rank|world_?size|procid|nodeid|localid|\bpmi_|pmix|\bompi_|mpi4py|distributed|process_group|deepspeed"
    r"|\baccelerate\b|accelerator\(|lightning|\bfabric\b|horovod|colossalai|megatron|torchrun|\bray\b"
    r"|\bdask\b|\bjax\b|tensorflow|trainingarguments|hostname|getfqdn|platform\.node"
    r"|uname\(|getpid|uuid|environ\.(?:items|copy)|\*\*os\.environ|dict\(os\.environ\)",
    re.IGNORECASE,
)
"""Words of code that divides work between processes, or gives each process its own files."""
_HIDES = re.compile(
    r"importlib|__import__|runpy|\bexec\(|subprocess|popen|os\.system|multiprocessing|\bspawn\b"
    r"|\block|flock|filelock|sqlite|redis|optuna|\bqueue|\bagent\("
)
"""Words of code that runs other code, or that takes its work from a list that several processes share."""
_TRAINS = re.compile(
    r"\.backward\(|\.fit\(|optim|torch\.save\(|save_file\(|save_pretrained\(|save_weights\("
    r"|\bnp\.savez?\("
)
"""Words of code that trains, or that saves its result: all copies write the same file."""
_SILENT = frozenset(
    {
        *("PIL", "albumentations", "click", "cv2", "datasets", "einops", "h5py", "hpcrun", "hydra"),
        *("joblib", "kornia", "matplotlib", "networkx", "numpy", "omegaconf", "pandas", "polars"),
        *("psutil", "pyarrow", "requests", "rich", "safetensors", "scipy", "seaborn", "skimage"),
        *("sentencepiece", "sklearn", "sympy", "tensorboard", "tensorboardX", "tiktoken", "timm"),
        *("tokenizers", "torch", "torchaudio", "torchinfo", "torchmetrics", "torchtext"),
        *("torchvision", "tqdm", "transformers", "typer", "wandb", "xarray", "yaml"),
    }
)
"""Packages that make no process group, and read no variable of a launcher, by themselves."""


def knows_ranks(command: Sequence[str], folder: Path) -> bool | None:
    """Return True if a copy of ``command`` may know its rank, False if it trains or saves without; else None.

    Args:
        folder: the working folder of the ranks.
    """
    if not is_python(command) or _KNOWS.search(" ".join(command)):
        return True
    script = script_of(command)
    if script is None:
        return None
    hides, trains = False, False
    try:
        for text in sources(folder / script):
            if _KNOWS.search(text):
                return True
            hides = hides or bool(_HIDES.search(text))
            trains = trains or bool(_TRAINS.search(text))
    except (OSError, SyntaxError, ValueError, LookupError):
        return None
    return False if trains and not hides else None


def sources(script: Path) -> Iterator[str]:
    """Yield the code of ``script`` and of the modules in its folder that it imports.

    Raises:
        OSError, SyntaxError, ValueError: a file cannot be read.
        LookupError: a module is in none of the known places.
    """
    # Python puts the folder of the script first in sys.path, also if the script is a link.
    root = script.resolve().parent
    waiting, seen = [script], {script}
    while waiting:
        path = waiting.pop()
        if len(seen) > _MOST_FILES or path.stat().st_size > _MOST_BYTES:
            raise LookupError(path)
        tree = ast.parse(path.read_text())
        names = set(_imported(tree))
        yield _code(tree)
        for name in names:
            found = list(_modules(root, name))
            if not found and name not in sys.stdlib_module_names and name not in _SILENT:
                raise LookupError(name)
            waiting += [one for one in found if one not in seen]
            seen.update(found)


def _code(tree: ast.AST) -> str:
    """Return the code without comments and docstrings, which may be about the ranks of other programs."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for one in body if isinstance(body, list) else ():
            if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant):
                one.value.value = None
    return ast.unparse(tree)


def _imported(tree: ast.AST) -> Iterator[str]:
    """Yield the packages that a module imports, without its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (one.name.partition(".")[0] for one in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _modules(root: Path, name: str) -> Iterator[Path]:
    if (root / f"{name}.py").is_file():
        yield root / f"{name}.py"
    elif (root / name).is_dir():
        yield from sorted((root / name).rglob("*.py"))
