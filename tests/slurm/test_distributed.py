"""DistributedConfig: read from real variables, validated, and written again."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcrun.errors import ClusterError
from hpcrun.ranks.addresses import port_candidates
from hpcrun.ranks.distributed import DistributedConfig
from hpcrun.ranks.existing_group import ExistingGroup, place_in_group
from hpcrun.slurm.placement import read_placement

Recorded = Callable[[str], dict[str, str]]


def gpu_config(**changes: object) -> DistributedConfig:
    fields = {
        "world_size": 8,
        "rank": 5,
        "local_rank": 1,
        "backend": "nccl",
        "num_nodes": 2,
        "node_rank": 1,
        "num_gpus_per_node": 4,
        "device_ids": (1,),
        "tasks_per_node": (4, 4),
    }
    return DistributedConfig.model_validate(fields | changes)


def test_a_slurm_step_with_gpus_uses_nccl(recorded_env: Recorded) -> None:
    config = DistributedConfig.from_env(recorded_env("uneven-step"))
    assert (config.backend, config.device_ids) == ("nccl", (0,))
    assert (config.launch_method, config.num_nodes, config.num_gpus_per_node) == ("slurm", 3, 2)
    assert config.master_port == port_candidates("2")[0]


def test_the_device_is_the_local_rank_modulo_visible_devices(recorded_env: Recorded) -> None:
    bound = recorded_env("gpus-per-task")
    assert bound["SLURM_LOCALID"] == "1"
    config = DistributedConfig.from_env(bound)
    assert config.device_ids == (0,)
    config.model_copy(update={"master_addr": "127.0.0.1"}).validate(visible_devices=1)


def test_cpu_means_gloo_without_a_device(recorded_env: Recorded) -> None:
    config = DistributedConfig.from_env(recorded_env("uneven-step"), cpu=True)
    assert (config.backend, config.device_ids) == ("gloo", ())


def test_all_ranks_of_a_job_agree_where_to_meet(recorded_env: Recorded) -> None:
    env = recorded_env("uneven-step")
    places = {
        (config.master_addr, config.master_port)
        for rank, node, local in [(0, 0, 0), (2, 0, 2), (5, 1, 2), (7, 2, 1)]
        for config in [
            DistributedConfig.from_env(
                env
                | {
                    "SLURM_PROCID": str(rank),
                    "SLURM_NODEID": str(node),
                    "SLURM_LOCALID": str(local),
                }
            )
        ]
    }
    assert len(places) == 1


def test_torchrun_on_two_nodes_needs_a_master_address(recorded_env: Recorded) -> None:
    env = recorded_env("torchrun")
    del env["MASTER_ADDR"]
    with pytest.raises(ClusterError, match="MASTER_ADDR is not set"):
        DistributedConfig.from_env(env)


def test_the_variables_written_are_read_back_by_us() -> None:
    config = gpu_config(master_addr="127.0.0.1", master_port=12000)
    again = read_placement(config.to_env_dict())
    assert (again.rank, again.world_size, again.node_rank) == (5, 8, 1)
    assert (again.master_addr, again.master_port) == ("127.0.0.1", 12000)
    assert (again.local_rank, again.local_world_size, again.tasks_per_node) == (1, 4, (4, 4))


@pytest.mark.parametrize(
    ("changes", "visible", "line"),
    [
        ({"rank": 8}, 4, "not below the world size 8"),
        ({"node_rank": 2}, 4, "node rank 2 is not below"),
        ({"tasks_per_node": (4, 2)}, 4, r"4\+2 = 6 tasks"),
        ({"tasks_per_node": (8,)}, 4, "1 task counts for 2"),
        ({"tasks_per_node": (5, 3)}, 4, "says 3 for node 1"),
        ({"local_rank": 4}, 4, "local rank 4 is not below"),
        ({}, 2, "4 ranks on this node but 2 visible"),
        ({"device_ids": (4,)}, 4, "device 4 is not among"),
        ({"world_size": 7, "tasks_per_node": ()}, 4, "the world size is 7, but 2 node.* are 8"),
        ({"world_size": 12, "tasks_per_node": ()}, 4, "the world size is 12, but 2 node"),
        ({"local_rank": 0}, 4, "local rank 0 on node 1 of 2 is rank 4; correct rank"),
        ({"node_rank": 0}, 4, "local rank 1 on node 0 of 2 is rank 1; correct rank"),
        ({"node_rank": 0, "tasks_per_node": ()}, 4, "is rank 1; correct rank"),
        ({"device_ids": (0, 1)}, 4, r"device_ids \[0, 1\] names 2 GPUs.*give device_ids=\(0,\)"),
        ({}, 0, "CUDA shows none"),
        ({"master_addr": "no-such-host.invalid"}, 4, "does not resolve"),
        ({"master_addr": "a" * 70 + ".invalid"}, 4, "does not resolve"),
    ],
)
def test_what_cannot_work_is_refused_in_one_line(
    changes: dict[str, object], visible: int, line: str
) -> None:
    with pytest.raises(ClusterError, match=line) as refusal:
        gpu_config(**changes).validate(visible_devices=visible)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "changes",
    [
        # Ranks distributed over the nodes in turn: --distribution=cyclic.
        {"local_rank": 2, "tasks_per_node": ()},
        {"launch_method": "slurm", "local_rank": 0},
        # torchrun's nodes may differ in size, and its variables do not show the sizes.
        {"launch_method": "torchrun", "world_size": 7, "tasks_per_node": ()},
        {"world_size": 6, "tasks_per_node": (2, 4), "rank": 3},
    ],
)
def test_ranks_in_an_order_that_a_launcher_makes_pass(changes: dict[str, object]) -> None:
    gpu_config(**changes).validate(visible_devices=4)


@pytest.mark.parametrize(
    ("rank", "ranks", "env", "expected"),
    [
        # mp.spawn on one host, without variables; expected: local rank, ranks per node, node, nodes.
        (1, 2, {}, (1, 2, 0, 1)),
        (5, 8, {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}, (1, 4, 1, 2)),
        # torchrun started one process per host, which spawned the ranks.
        (
            *(3, 4),
            {
                **{"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"},
                **{"GROUP_RANK": "1", "MASTER_ADDR": "first"},
            },
            (1, 2, 1, 2),
        ),
    ],
)
def test_ranks_of_a_group_that_the_program_made_are_placed(
    rank: int, ranks: int, env: dict[str, str], expected: tuple[int, int, int, int]
) -> None:
    found = place_in_group(ExistingGroup(rank, ranks, nccl=False), env)
    assert (found.rank, found.world_size) == (rank, ranks)
    place = (found.local_rank, found.local_world_size, found.node_rank, found.num_nodes)
    assert place == expected


def test_the_launcher_s_word_is_kept_where_the_group_agrees(recorded_env: Recorded) -> None:
    env = recorded_env("uneven-step")
    placement = read_placement(env)
    group = ExistingGroup(placement.rank, placement.world_size, nccl=True)
    assert place_in_group(group, env) == placement


def test_a_rank_of_amds_gpus_uses_nccl(recorded_env: Recorded) -> None:
    env = recorded_env("uneven-step")
    del env["CUDA_VISIBLE_DEVICES"]
    config = DistributedConfig.from_env({**env, "ROCR_VISIBLE_DEVICES": "0,1,2,3"})
    assert (config.backend, config.device_ids) == ("nccl", (0,))


def test_ranks_that_would_share_slices_of_a_gpu_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-9f1c,MIG-2a3b")
    with pytest.raises(ClusterError, match="slices of a GPU"):
        gpu_config(master_addr="127.0.0.1").validate()


def test_other_spellings_of_a_trainer_by_hand_are_read() -> None:
    config = DistributedConfig.model_validate(
        {"device_ids": None, "launch_method": "torch.distributed.launch"}
    )
    assert (config.device_ids, config.launch_method) == ((), "torchrun")
    assert DistributedConfig.model_validate({"device_ids": [0]}).device_ids == (0,)
    rank, world_size, local_rank = gpu_config()
    assert (rank, world_size, local_rank) == (5, 8, 1)
    assert config.validate() is True


def test_values_without_a_launcher_place_all_ranks_here(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MASTER_PORT", "23456")
    config = DistributedConfig.from_values(rank=2, world_size=4, backend="gloo", device_ids=None)
    assert (config.rank, config.world_size, config.local_rank) == (2, 4, 2)
    assert (config.num_gpus_per_node, config.launch_method) == (4, "spawn")
    assert (config.master_addr, config.master_port, config.device_ids) == ("127.0.0.1", 23456, ())
    assert config.validate() is True
    with pytest.raises(ClusterError, match="give both"):
        DistributedConfig.from_values(rank=2)


def test_values_of_a_program_may_not_contradict_its_launcher(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in gpu_config().to_env_dict().items():
        monkeypatch.setenv(name, value)
    assert DistributedConfig.from_values(rank=5, device_ids=[3]).device_ids == (3,)
    with pytest.raises(ClusterError, match="world_size=4 contradicts world_size 8 of the launcher"):
        DistributedConfig.from_values(rank=5, world_size=4)
