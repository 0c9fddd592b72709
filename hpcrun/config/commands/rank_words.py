"""Find out from the source of a Python script if its copies can divide work: if it knows of ranks.

The answer errs towards yes: a wrong warning costs more than a missing one.
"""

import ast
import contextlib
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrun.config.commands.command import is_python, script_of

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
_WRITES = re.compile(
    r"\.save\w*\(|\.dump\(|write_(?:text|bytes)\(|\.to_(?:csv|parquet|json|pickle|hdf)\(|savefig\("
    r"|open\([^)\n]*[\"'][wax]b?\+?[\"']"
)
_OWN_NAMES = re.compile(r"tempfile|secrets|token_hex|random|time_ns|time\.time|perf_counter")
"""Words of code that may write files with different names or different samples in each copy."""
_GROUP_OF_TRAINER = re.compile(
    r"^\s*(?:from|import)\s+(?:lightning|pytorch_lightning)\b", re.MULTILINE
)
_OWN_RANKS = re.compile(
    r"environ|getenv|torch\.distributed|init_process_group|mpi4py|horovod|\bray\b|\bjax\b|subprocess"
)
"""Words of a script that may divide its work without the process group of its trainer."""
_MPI_IMPORT = re.compile(r"^\s*(?:from|import)\s+mpi4py\b", re.MULTILINE)
_MPI_LIBRARY = re.compile(rb"libmpi\w*\.so|MPI_Init\b|MPI_Init_thread\b")
_MOST_OF_PROGRAM = 64 << 20
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
    hides, repeats = False, False
    try:
        for text in sources(folder / script):
            if _KNOWS.search(text):
                return True
            hides = hides or bool(_HIDES.search(text))
            writes = _WRITES.search(text) and not _OWN_NAMES.search(text)
            repeats = repeats or bool(_TRAINS.search(text) or writes)
    except (OSError, SyntaxError, ValueError, LookupError):
        return None
    return False if repeats and not hides else None


def trainer_makes_group(command: Sequence[str], folder: Path) -> bool:
    """Return True if the ranks of a Python script can only meet in the process group of Lightning's trainer.

    Args:
        command, folder: as for :func:`knows_ranks`.
    """
    text = _own_text(command, folder)
    return bool(_GROUP_OF_TRAINER.search(text)) and not _OWN_RANKS.search(text)


def uses_mpi(command: Sequence[str], folder: Path) -> bool:
    """Return True if ``command`` is a program of MPI, by its imports or its libraries.

    Args:
        command, folder: as for :func:`knows_ranks`.
    """
    if is_python(command):
        return bool(_MPI_IMPORT.search(_own_text(command, folder)))
    program = shutil.which(command[0]) or str(folder / command[0])
    try:
        with Path(program).open("rb") as file:
            return bool(_MPI_LIBRARY.search(file.read(_MOST_OF_PROGRAM)))
    except OSError:
        return False


def _own_text(command: Sequence[str], folder: Path) -> str:
    """Return the script and the modules of its folder as one text, as far as they can be read."""
    script, texts = script_of(command), list[str]()
    # A module that is not known may be a library.
    with contextlib.suppress(OSError, SyntaxError, ValueError, LookupError):
        if script is not None:
            for text in sources(folder / script):
                texts.append(text)
    return "\n".join(texts)


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
        yield _code(tree)
        for name in _imported(tree):
            found = list(_modules(root, name))
            if not found and name not in sys.stdlib_module_names and name not in _SILENT:
                raise LookupError(name)
            waiting += [one for one in found if one not in seen]
            seen.update(found)


def _code(tree: ast.Module) -> str:
    """Return the code without comments and docstrings, which may speak of ranks."""
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            texts = [one for one in body if _is_text(one)]
            # An empty body is no code.
            node.body = [one for one in body if one not in texts] or [ast.Pass()]  # type: ignore[attr-defined]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


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
