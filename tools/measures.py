"""The measures of the shape of hpcrun: who imports whom, and what a dry run and a job enter and read.

    python tools/measures.py [--list MEASURE] [--run]

Prints each figure with its aim. ``--list`` prints the places behind a figure. ``--run`` runs one job on the
local cluster as well, and counts how often each of its processes reads the event log and the config.
`tools/bench/startup.py` measures the processor time of a dry run, relative to ``import submitit``.
"""

import argparse
import ast
import collections
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

ROOT = Path(__file__).resolve().parents[1]

DECIDES, TRAINS, BOTH = "decides", "trains", "both"
"""The half that submits, starts, watches and decides; the half that trains; what both may import."""

ROOMS: dict[str, str] = {
    # The public names are imported at their first use.
    "hpcrun": BOTH,
    **dict.fromkeys(("descendants", "drafts", "errors", "exit_codes", "folders", "printing"), BOTH),
    **dict.fromkeys(("config", "run", "storage", "devices", "slurm"), BOTH),
    **dict.fromkeys(("job", "diagnose", "api", "cli", "submit", "__main__"), DECIDES),
    **dict.fromkeys(("ranks", "checkpoint", "train", "worker", "tasks", "integrations"), TRAINS),
    # Add-ons, by module: most of them live between the modules of the core today.
    **dict.fromkeys(
        ("nodes", "checkpoint.memory", "run.memory_keeper", "job.in_place"), "in place"
    ),
    **dict.fromkeys(("ranks.fork_client", "ranks.fork_messages", "ranks.fork_server"), "in place"),
    **dict.fromkeys(("ranks.fork_template", "ranks.process_state", "run.slow_nodes"), "in place"),
    **dict.fromkeys(("network", "cli.commands.netcheck", "cli.commands.nccl"), "network"),
    **{"cli.commands.preflight": "network", "cli.remote": "remote", "cli.ssh": "remote"},
    **dict.fromkeys(("diagnose.collectives", "diagnose.sightings", "diagnose.finding"), "doctor"),
    **dict.fromkeys(("diagnose.progress", "diagnose.state_dict", "cli.commands.doctor"), "doctor"),
    **dict.fromkeys(("api.sweeps", "cli.sweep", "run.sweep_file"), "sweeps"),
    **dict.fromkeys(("api.functions", "call"), "functions"),
    **dict.fromkeys(("results", "cli.commands.aggregate", "cli.commands.compare"), "results"),
    **dict.fromkeys(("cli.commands.plot", "cli.commands.report"), "results"),
    **dict.fromkeys(("integrations.accelerate", "integrations.transformers"), "frameworks"),
    **dict.fromkeys(("integrations.lightning", "integrations.lightning_state"), "frameworks"),
    **dict.fromkeys(("integrations.hydra", "integrations.wandb"), "frameworks"),
    **dict.fromkeys(("tasks.llama", "tasks.language_model", "tasks.hugging_face"), "large models"),
    **dict.fromkeys(("tasks.chunked_loss", "tasks.corpus", "tasks.packing"), "large models"),
    **dict.fromkeys(("train.model.deferred", "train.model.counter_draws"), "large models"),
    **dict.fromkeys(("checkpoint.export", "checkpoint.export_progress"), "large models"),
    **dict.fromkeys(("checkpoint.weights", "checkpoint.stored_model"), "large models"),
    **dict.fromkeys(("train.model.initial_weights", "cli.commands.export"), "large models"),
    **dict.fromkeys(("estimate", "cli.commands.estimate"), "estimate"),
    **dict.fromkeys(("train.health.hang_diagnosis", "run.stacks", "job.py_spy"), "hangs"),
    **dict.fromkeys(("diagnose.stacks", "cli.commands.stacks"), "hangs"),
    **dict.fromkeys(("config.site", "slurm.containers", "slurm.avoided_nodes"), "sites"),
    **dict.fromkeys(("job.bad_nodes", "job.notifying", "cli.commands.nodes"), "sites"),
}
"""The room of each package or module, by the longest name that fits: a half of the core, or an add-on."""

Kind = Literal["at import", "in a function"]
Imports = dict[tuple[str, str], Kind]


def room(module: str) -> str:
    """Return the room of ``module``, such as ``hpcrun.job.step``."""
    name = module.partition(".")[2]
    while name and name not in ROOMS:
        name = name.rpartition(".")[0]
    if not name and module != "hpcrun":
        raise SystemExit(f"{module}: has no room; add its package to ROOMS in tools/measures.py")
    return ROOMS[name or "hpcrun"]


def modules(root: Path = ROOT) -> dict[str, ast.Module]:
    """Return the syntax tree of each module of hpcrun."""
    found = {}
    for path in sorted((root / "hpcrun").rglob("*.py")):
        name = ".".join(path.relative_to(root).with_suffix("").parts)
        found[name.removesuffix(".__init__")] = ast.parse(path.read_text(encoding="utf-8"))
    return found


def imports(trees: dict[str, ast.Module]) -> Imports:
    """Return each import of one module by another; those for type checkers do not count."""
    found: Imports = {}

    def targets(node: ast.AST) -> Iterator[str]:
        for alias in (
            getattr(node, "names", ()) if isinstance(node, (ast.Import, ast.ImportFrom)) else ()
        ):
            inside = (
                f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            )
            yield inside if inside in trees else getattr(node, "module", "")

    def walk(module: str, node: ast.AST, kind: Kind) -> None:
        for child in ast.iter_child_nodes(node):
            for target in targets(child):
                if (
                    target in trees
                    and target != module
                    and found.get((module, target)) != "at import"
                ):
                    found[module, target] = kind
            if isinstance(child, ast.If) and getattr(child.test, "id", "") == "TYPE_CHECKING":
                continue
            is_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef))
            walk(module, child, "in a function" if is_function else kind)

    for name, tree in trees.items():
        walk(name, tree, "at import")
    return found


def circles(edges: Iterable[tuple[str, str]]) -> list[str]:
    """Return the groups of modules that import each other, each as one line."""
    below = collections.defaultdict(set)
    for module, target in edges:
        below[module].add(target)
    reached: dict[str, set[str]] = {}
    for module in [*below]:
        seen, waiting = set[str](), [module]
        while waiting:
            new = below.get(waiting.pop(), set()) - seen
            seen |= new
            waiting += new
        reached[module] = seen
    groups = {
        frozenset(other for other in seen if module in reached.get(other, ()))
        for module, seen in reached.items()
        if module in seen
    }
    return sorted(" <-> ".join(sorted(group)) for group in groups)


def between(edges: Imports, origins: set[str], targets: set[str]) -> list[str]:
    """Return the imports from a room of ``origins`` into one of ``targets``."""
    return [
        f"{module} -> {target}{' (in a function)' * (kind != 'at import')}"
        for (module, target), kind in sorted(edges.items())
        if room(module) in origins and room(target) in targets
    ]


def annotations(trees: dict[str, ast.Module], rooms: set[str]) -> list[str]:
    """Return a line for each use of ``Any`` in a module of ``rooms``."""
    return [
        f"{name}:{node.lineno}"
        for name, tree in trees.items()
        if room(name) in rooms
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and node.id == "Any"
    ]


def text_comparisons(trees: dict[str, ast.Module]) -> list[str]:
    """Return the comparisons of an event's kind with text, outside the module that reads the log."""
    # Nodes of YAML have a tag too.
    homes = ("hpcrun.run.journal", "hpcrun.config.reader")
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, tree in trees.items()
        if not name.startswith(homes)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare)
        and any(
            isinstance(side, ast.Attribute) and side.attr == "tag"
            for side in (node.left, *node.comparators)
        )
    ]


_DRY_RUN = """
import os, sys
entered = set()
def profile(frame, event, _):
    if event == "call" and frame.f_code.co_flags & 1:  # CO_OPTIMIZED: no body of a module or a class
        entered.add(frame.f_code.co_filename)
sys.setprofile(profile)
from hpcrun.cli.main import main
try:
    main(["submit", "--dry-run", "--executor", "local"])
except SystemExit:
    pass
sys.setprofile(None)
home = os.path.dirname(sys.modules["hpcrun"].__file__) + os.sep
for name in sorted(entered):
    if name.startswith(home):
        print("entered", "hpcrun/" + name.removeprefix(home), file=sys.stderr)
for name in sorted(sys.modules):
    if name.partition(".")[0] == "hpcrun":
        print("imported", name, file=sys.stderr)
"""


def dry_run() -> tuple[list[str], list[str]]:
    """Return the files with a function that a dry run calls, and the modules that a dry run imports."""
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(
            [sys.executable, "-c", _DRY_RUN],
            cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
            check=True,
        )  # fmt: skip
    lines = [line.partition(" ") for line in done.stderr.splitlines()]
    entered = [name for kind, _, name in lines if kind == "entered"]
    return entered, [name for kind, _, name in lines if kind == "imported"]


_HOOK = """
import os, sys
before = None
def opened(event, arguments):
    global before
    if event == "open" and isinstance(arguments[0], str):
        name = os.path.basename(arguments[0])
        if name in ("events.jsonl", "config.yaml") and arguments[2] & 3 == os.O_RDONLY:
            # An open with an opener is two events.
            twice, before = before == arguments[0] and arguments[1] is None, arguments[0]
            if twice:
                return
            words = [os.path.basename(word) for word in sys.orig_argv[1:] if not word.startswith("-")]
            with open(os.environ["HPCRUN_MEASURES"], "a") as stream:
                stream.write(f"{name} in {' '.join(words[:2])}\\n")
sys.addaudithook(opened)
"""


def reads_of_a_job() -> list[str]:
    """Return a line for each kind of process of a local job, with its number of reads of each file."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_HOOK)
        record = folder / "reads"
        environ = os.environ | {"PYTHONPATH": os.pathsep.join([name, str(ROOT)])}
        own = [sys.executable, "-m", "hpcrun"]
        words = [
            "--executor",
            "local",
            "--cpu",
            "--nodes",
            "1",
            "--gpus",
            "1",
            "--name",
            "measured",
        ]
        subprocess.run(
            [*own, "submit", "--detach", *words, "--", "true"], cwd=folder,
            env=environ | {"HPCRUN_MEASURES": str(record)}, stdout=subprocess.DEVNULL, check=True,
        )  # fmt: skip
        # This command waits for the end, and is not counted.
        environ["PYTHONPATH"] = str(ROOT)
        wait = [*own, "logs", "-f", "measured"]
        subprocess.run(wait, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
        counts = collections.Counter(record.read_text().splitlines())
    return [f"{count} reads of {line}" for line, count in sorted(counts.items())]


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--list", metavar="MEASURE", help="print the places behind this figure, by its first word"
    )
    parser.add_argument("--run", action="store_true", help="run a job on the local cluster as well")
    options, trees = parser.parse_args(), modules()
    edges = imports(trees)
    core, (entered, imported) = {BOTH, DECIDES, TRAINS}, dry_run()
    add_ons = {*ROOMS.values()} - core
    at_import = [pair for pair, kind in edges.items() if kind == "at import"]
    figures: list[tuple[str, list[str], str]] = [
        ("trains: imports of the half that decides", between(edges, {TRAINS}, {DECIDES}), "0"),
        ("decides: imports of the half that trains", between(edges, {DECIDES}, {TRAINS}), "0"),
        ("both: imports of a half by what both import", between(edges, {BOTH}, core - {BOTH}), "0"),
        ("add-ons: imports by the core", between(edges, core, add_ons), "0"),
        ("circles: at import", circles(at_import), "0"),
        ("lazy: circles with imports in functions", circles(edges), "0"),
        ("entered: files with a function that a dry run calls", entered, "20"),
        ("imported: modules of hpcrun in a dry run", imported, "-"),
        ("Any: in the core", annotations(trees, core), "300"),
        ("add-on: Any in the add-ons", annotations(trees, add_ons), "-"),
        ("kinds: comparisons of an event's kind as text", text_comparisons(trees), "0"),
    ]
    if options.list:
        print(
            *(
                line
                for name, lines, _ in figures
                if name.startswith(options.list)
                for line in lines
            ),
            sep="\n",
        )
        return
    for name, lines, aim in figures:
        print(f"{len(lines):6}  aim {aim:>3}  {name}")
    for line in reads_of_a_job() if options.run else ():
        print(line)


if __name__ == "__main__":
    main()
