"""DistributedConfig: values that follow from others, and configs in files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hpcrun.config import ConfigError
from hpcrun.errors import ClusterError
from hpcrun.ranks.distributed import DistributedConfig

TORCHRUN = {
    **{"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12355"},
}


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")


def test_plain_values_place_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    config = DistributedConfig(
        world_size=4, rank=3, backend="gloo", master_addr="127.0.0.1", master_port=29500,
        num_nodes=2, node_rank=1, num_gpus_per_node=2, device_ids=None,  # type: ignore[arg-type]
        find_unused_parameters=False, broadcast_buffers=True, gradient_as_bucket_view=True,
        launch_method="torchrun",
    )  # fmt: skip
    assert (config.local_rank, config.device_ids, config.validate()) == (1, (), True)
    again = DistributedConfig.from_env(config.to_env_dict())
    assert again.to_env_dict() == config.to_env_dict()
    derived = DistributedConfig(world_size=4, rank=3, num_nodes=2)
    assert (derived.num_gpus_per_node, derived.node_rank, derived.local_rank) == (2, 1, 1)
    assert (derived.backend, derived.validate()) == ("gloo", True)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    assert DistributedConfig(world_size=2, rank=1).device_ids == (1,)
    assert DistributedConfig(world_size=2, rank=1).backend == "nccl"
    assert DistributedConfig(backend="gloo").device_ids == ()
    assert DistributedConfig(device_ids=()).backend == "gloo"


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"world_size": 4, "rank": 4}, "the rank is not below the world size 4"),
        ({"world_size": 4, "num_nodes": 2, "num_gpus_per_node": 4}, "2 node.* are 8"),
        ({"device_ids": (0, 0)}, r"device_ids \[0, 0\] names 2 GPUs"),
        ({"device_ids": (-1,)}, r"device_ids \[-1\]: devices count from 0"),
        ({"num_nodes": 2, "world_size": 2, "node_rank": 2}, "node rank 2 is not below"),
    ],
)
def test_validate_finds_values_that_do_not_fit(values: dict[str, object], line: str) -> None:
    with pytest.raises(ClusterError, match=line):
        DistributedConfig.model_validate(values).validate(visible_devices=1)


@pytest.mark.parametrize("suffix", [".yaml", ".yml", ".json"])
def test_a_config_is_the_same_after_a_file(tmp_path: Path, suffix: str) -> None:
    config = DistributedConfig(
        world_size=8, rank=5, num_nodes=2, backend="nccl", device_ids=(1,), bucket_mb=2.5,
        master_addr="host0", launch_method="torchrun", tasks_per_node=(4, 4), job_id="7_1",
    )  # fmt: skip
    path = tmp_path / f"parallel{suffix}"
    config.to_file(path)
    assert DistributedConfig.from_file(path) == config
    assert suffix != ".json" or json.loads(path.read_text())["rank"] == 5
    with pytest.raises(ConfigError, match=r"\.toml: the name must end in \.yaml"):
        config.to_file(tmp_path / "parallel.toml")
    with pytest.raises(ConfigError, match="cannot be written: No such file"):
        config.to_file(tmp_path / "missing" / "parallel.yaml")


def test_a_rank_of_null_is_the_launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "train_ddp.yaml"
    path.write_text(
        'model: large\nparallel:\n  world_size: 3\n  rank: null\n  master_addr: "localhost"\n'
        '  master_port: "12355"\n'
    )
    parent = DistributedConfig.from_file(path)
    assert (parent.world_size, parent.rank, parent.launch_method) == (3, 0, "spawn")
    assert (parent.master_addr, parent.master_port) == ("localhost", 12355)
    child = DistributedConfig.from_file(str(path), rank=2)
    assert (child.rank, child.local_rank, child.validate()) == (2, 2, True)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    found = DistributedConfig.from_file(path)
    assert (found.rank, found.local_rank, found.launch_method) == (2, 2, "torchrun")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(
        ConfigError, match=r"train_ddp.yaml: parallel: world_size is 3, and torchrun"
    ):
        DistributedConfig.from_file(path)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("world_sizes: 3\n", ":1: world_sizes: unknown key; did you mean world_size?"),
        (
            "parallel:\n  zebra: 3\n",
            ":2: parallel.zebra: unknown key; remove it, or put it outside",
        ),
        ("rank: 0\nworld_size: three\n", ":2: world_size: should be a whole number, not 'three'"),
        ("world_size: true\n", ":1: world_size: should be a number, not true"),
        ("parallel:\n  rank: false\n", ":2: parallel.rank: should be a number, not false"),
        ("bucket_mb: true\n", ":1: bucket_mb: should be a number, not true"),
        ("master_port: 70000\n", ":1: master_port: should be at most 65535, not 70000"),
        ("backend: mpi\n", ":1: backend: should be nccl or gloo, not 'mpi'"),
        ("rank: 1\nrank: 2\n", ":2: rank: is given twice, first on line 1"),
        ("- 1\n", ":1: a config should be keys and values"),
        ("device_ids: [a]\n", ":1: device_ids.0: should be a whole number, not 'a'"),
    ],
)
def test_a_mistake_in_a_file_has_a_line_and_place(tmp_path: Path, text: str, line: str) -> None:
    path = tmp_path / "parallel.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as refusal:
        DistributedConfig.from_file(path)
    assert line in str(refusal.value)
    assert len(refusal.value.lines) == 1
