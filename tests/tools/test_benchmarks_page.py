"""docs/benchmarks.md names every benchmark, with options that exist, and a short version of each runs."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCH = ROOT / "tools" / "bench"
PAGE = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
SMALL = """\
tools/bench/gpu.py --sizes tiny --device cpu --no-compile --steps 2
tools/bench/loop.py --only mlp --starts 1 --rounds 1
tools/bench/checkpoint.py --gigabytes 0.05 --window 0.5 --repeat 1
tools/bench/scaling.py --rounds 1 --only fsdp --width 32 --layers 1 --context 32 --batch 4 --steps 20
python tools/bench/startup.py 1
tools/bench/restart.py --rounds 1 --cases crash --systems "in place"
tools/bench/build_memory.py --ranks 2 --width 64 --layers 2
tools/bench/scale.py --quick
tools/bench/casts.py --width 32 --vocabulary 256
tools/bench/journal.py --events 50
tools/bench/network_model.py --gpu a100-80
tools/bench/graphs.py --layers 3
tools/bench/estimate_published.py --only "llm-foundry 13B"
tools/bench/netcheck.py --nodes 2 --seconds 0.5
tools/bench/aggregate.py --runs 20 --rows 50
""".splitlines()
NAMED = re.findall(r"`((?:python )?tools/bench/[^`]*)`", PAGE)
COMMANDS = [*SMALL, *NAMED]


def test_every_benchmark_is_on_the_page_with_a_short_version() -> None:
    programs = {f"tools/bench/{path.name}" for path in BENCH.glob("*.py")}
    for commands in (NAMED, SMALL):
        named = {word for command in commands for word in command.split() if "tools/" in word}
        assert named == programs


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_valid_options(command: str) -> None:
    words = shlex.split(command)
    python = words.pop(0) if words[0] == "python" else None
    program = ROOT / words[0]
    assert python or os.access(program, os.X_OK)
    source = program.read_text(encoding="utf-8")
    assert python or source.startswith("#!/usr/bin/env python3\n")
    for word in words[1:]:
        assert not word.startswith("--") or f'"{word}"' in source


@pytest.mark.slow
@pytest.mark.parametrize("command", SMALL)
def test_every_short_version_runs(command: str, tmp_path: Path) -> None:
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    environ = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "-c", command], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(done.stdout.splitlines()) >= 2
