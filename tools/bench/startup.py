"""Cost of a dry run, relative to ``python -c "import submitit"``; prints both and their ratio.

    python tools/bench/startup.py [ROUNDS]

The two take turns, so that a busy machine slows both equally. The medians compare CPU time
(which depends little on other processes) and wall time.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time

COMMANDS = {
    "import submitit": ["-c", "import submitit"],
    "dry run": ["-m", "hpcrun.submit", "--dry-run"],
}


def cost(arguments: list[str], folder: str) -> tuple[float, float]:
    """Return (CPU, wall) seconds of one run of the interpreter with ``arguments``."""
    before, begun = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *arguments], cwd=folder, stdout=subprocess.DEVNULL, check=True)
    wall, after = time.perf_counter() - begun, os.times()
    cpu = (
        after.children_user - before.children_user + after.children_system - before.children_system
    )
    return cpu, wall


def main(rounds: int) -> None:
    """Measure ``rounds`` of each, after a warm-up of each that fills the caches."""
    costs: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name, arguments in COMMANDS.items():
                spent = cost(arguments, folder)
                if number:
                    costs[name].append(spent)
    for index, kind in enumerate(("CPU", "wall")):
        medians = {name: statistics.median(c[index] for c in costs[name]) for name in COMMANDS}
        base, ours = medians["import submitit"], medians["dry run"]
        print(f"{kind:4}  import submitit {base * 1000:6.1f} ms", end="")
        print(f"  dry run {ours * 1000:6.1f} ms  ratio {ours / base:.2f}  ({rounds} rounds)")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 12)
