"""CPU and wall time of a dry run and of ``import pydantic``, relative to ``import submitit``.

    python tools/bench/startup.py [ROUNDS]

They take turns, so that a busy machine slows all equally, and the medians are compared. CPU time depends
little on other processes. All have bytecode, as a user's second command has, even where
PYTHONDONTWRITEBYTECODE is set. ``import pydantic`` shows the share of the config's models.
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time

COMMANDS = {
    "import submitit": ["-c", "import submitit"],
    # As far as a class with a field loads it.
    "import pydantic": ["-c", "from pydantic import AfterValidator, BaseModel, Field"],
    "dry run": ["-m", "hpcrun.submit", "--dry-run"],
}


def cost(arguments: list[str], folder: str, bytecode: str) -> tuple[float, float]:
    """Return (CPU, wall) seconds of one run of the interpreter with ``arguments``."""
    environ = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ["PYTHONPYCACHEPREFIX"] = bytecode
    command = [sys.executable, *arguments]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(command, cwd=folder, env=environ, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime, wall


def main(rounds: int) -> None:
    """Measure ``rounds`` of each, after a warm-up of each that fills the caches."""
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as bytecode:
        for number in range(rounds + 1):
            for name, arguments in COMMANDS.items():
                spent = cost(arguments, folder, bytecode)
                if number:
                    costs[name].append(spent)
    for index, kind in enumerate(("CPU", "wall")):
        medians = {name: statistics.median(c[index] for c in costs[name]) for name in COMMANDS}
        base = medians["import submitit"]
        shown = (
            f"{name} {cost * 1000:.0f} ms ({cost / base:.2f})" for name, cost in medians.items()
        )
        print(f"{kind:4}", *shown, f"of {rounds} rounds", sep="  ")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
