"""Compiled code survives a restart on another node, in a file that never does harm."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hpcrun.config import override_layer, resolve, to_yaml
from hpcrun.run.directory import RunDirectory, create
from hpcrun.train.model.compile_cache import CompileCache, open_cache
from tests.kills import killed_at_each_step

ROOT = Path(__file__).parents[2]


def start(file: Path, node: Path) -> dict[str, Any]:
    """Compile in a process on a node with the cache folder ``node``."""
    ended = subprocess.run(
        [sys.executable, "-m", "tests.train.compiling", str(file)],
        cwd=ROOT,
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(node)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Return the file of a first start, and what that start counted."""
    folder = tmp_path_factory.mktemp("made")
    return folder / "cache.bin", start(folder / "cache.bin", folder / "node-1")


def test_a_start_on_another_node_compiles_nothing(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    file, first = made
    assert (first["line"], first["hits"]) == (None, 0)
    assert first["misses"] > 0
    assert not first["written again"]
    second = start(file, tmp_path / "node-2")
    assert (second["hits"], second["misses"]) == (first["misses"], 0)
    assert second["line"].startswith("compiled code of an earlier start: ")


def flip(raw: bytes) -> bytes:
    middle = len(raw) // 2
    return raw[:middle] + bytes([raw[middle] ^ 16]) + raw[middle + 1 :]


@pytest.mark.parametrize(
    "change", [flip, lambda raw: raw[:-1], lambda raw: raw[:100], lambda _: b""]
)
def test_a_damaged_file_is_one_line(
    made: tuple[Path, dict[str, Any]], tmp_path: Path, change: Callable[[bytes], bytes]
) -> None:
    file = tmp_path / "cache.bin"
    file.write_bytes(change(made[0].read_bytes()))
    cache = CompileCache(file, writes=True, loads=True)
    assert cache.load() == f"{file}: is damaged; the model is compiled again"


def test_a_killed_save_leaves_a_whole_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info, packed = SimpleNamespace(artifacts={"inductor": ["a"]}), [b"old" * 999]
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (packed[0], info))
    monkeypatch.setattr(
        torch.compiler, "load_cache_artifacts", lambda content: found.append(content) or info
    )
    file, found = tmp_path / "cache.bin", list[bytes]()
    CompileCache(file, writes=True, loads=False).save()
    packed[0] = b"newer" * 999
    seen, left = set(), 0
    for place in killed_at_each_step(CompileCache(file, writes=True, loads=False).save):
        line = CompileCache(file, writes=False, loads=True).load()
        assert str(line).startswith("compiled code of an earlier start: 1 entries"), place
        seen.add(found.pop())
        left += len([*tmp_path.iterdir()]) - 1
        assert CompileCache(file, writes=True, loads=False).load() is None
        assert [*tmp_path.iterdir()] == [file], place
    assert seen == {b"old" * 999, b"newer" * 999}
    assert left


def test_an_error_of_torch_does_not_end_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", fail)
    cache = CompileCache(tmp_path / "cache.bin", writes=True, loads=True)
    cache.after_step()
    cache.save()
    line = f"{tmp_path}/cache.bin: torch cannot pack it: RuntimeError: no; a restart compiles again"
    assert capsys.readouterr().err == f"hpcrun: {line}\n"


def test_a_file_that_everybody_may_write_is_not_loaded(
    made: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "cache.bin"
    file.write_bytes(made[0].read_bytes())
    file.chmod(0o666)
    cache = CompileCache(file, writes=True, loads=True)
    assert "everybody may write to it; run `chmod o-w" in str(cache.load())


@pytest.mark.parametrize(
    ("node_rank", "local_rank", "index", "name", "loads", "writes"),
    [
        (0, 0, 0, "cache.bin", True, True),
        (0, 1, 1, "cache-1.bin", True, True),
        (1, 1, 1, "cache-1.bin", True, False),
        # Slurm shows each rank only its own GPU.
        (0, 1, 0, "cache.bin", False, False),
        (0, 1, None, "cache.bin", False, False),
    ],
)
def test_each_gpu_of_a_node_has_its_own_file(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    node_rank: int,
    local_rank: int,
    index: int | None,
    name: str,
    loads: bool,
    writes: bool,
) -> None:
    # torch's name of an entry includes the number of the GPU.
    device = torch.device("cpu") if index is None else torch.device("cuda", index)
    path = tmp_path / "cache.bin"
    cache = open_cache(path, device, node_rank=node_rank, local_rank=local_rank)
    info = SimpleNamespace(artifacts={"inductor": ["a"]})
    monkeypatch.setattr(torch.compiler, "save_cache_artifacts", lambda: (b"packed", info))
    monkeypatch.setattr(torch.compiler, "load_cache_artifacts", lambda _: info)
    cache.after_step()
    assert [file.name for file in tmp_path.iterdir()] == [name] * writes
    CompileCache(tmp_path / name, writes=True, loads=False).after_step()
    assert (cache.load() is not None) == loads


def attempt(run: RunDirectory, node: Path) -> tuple[list[int], str]:
    """Start two ranks of ``run`` on ``node``; return their exit codes and the output of rank 0."""
    node.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    ranks = []
    for rank in ("0", "1"):
        environ = os.environ | {
            **{"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "GLOO_SOCKET_IFNAME": "lo"},
            **{"TMPDIR": str(node), "OMP_NUM_THREADS": "1"},
        }
        environ.pop("TORCHINDUCTOR_CACHE_DIR", None)
        command = [sys.executable, "-m", "hpcrun.worker", str(run.path)]
        ranks.append(
            subprocess.Popen(
                command,
                cwd=ROOT,
                env=environ,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    said = [rank.communicate(timeout=800)[0] for rank in ranks]
    return [rank.returncode for rank in ranks], said[0]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_an_interrupted_run_finds_its_code_on_another_node(tmp_path: Path) -> None:
    layer = override_layer(
        [
            *(
                "task=tests.train.faulty_tasks:Exact",
                "model.stop_at=4",
                "job.gpus=2",
                "job.cpu=true",
            ),
            *("train.compile=true", "train.steps=5", "train.batch_size=8"),
        ]
    )
    run = create(tmp_path / "run", to_yaml(resolve([layer])), {"folder": str(ROOT)})
    codes, said = attempt(run, tmp_path / "node-1")
    assert codes == [75, 75], said
    assert "compiled code" not in said
    made = run.compile_cache.stat().st_mtime_ns
    codes, said = attempt(run, tmp_path / "node-2")
    assert codes == [0, 0], said
    assert "hpcrun: compiled code of an earlier start: " in said
    # This start has compiled nothing that the file lacks.
    assert run.compile_cache.stat().st_mtime_ns == made
