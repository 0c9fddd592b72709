"""The launcher of this process, from variables recorded inside real launches."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from hpcrun.errors import ClusterError
from hpcrun.slurm.placement import job_id, read_placement

Env = dict[str, str]
Recorded = Callable[[str], Env]

OPENMPI = {
    "OMPI_COMM_WORLD_RANK": "5",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_NODE_RANK": "1",
}


def test_an_uneven_step_is_read_from_its_step_variables(recorded_env: Recorded) -> None:
    placement = read_placement(recorded_env("uneven-step"))
    assert placement.method == "slurm"
    assert (placement.rank, placement.world_size) == (6, 8)
    assert (placement.node_rank, placement.num_nodes) == (2, 3)
    assert (placement.local_rank, placement.local_world_size) == (0, 2)
    assert placement.tasks_per_node == (3, 3, 2)
    assert placement.master_addr == "node1"
    assert placement.job_id == "2"


def test_a_step_on_fewer_nodes_ignores_the_job_s_variables(
    recorded_env: Recorded,
) -> None:
    env = recorded_env("small-step")
    assert env["SLURM_NODELIST"] == "node[1-3]"
    placement = read_placement({**env, "SLURM_STEP_NODELIST": "node[2-3]"})
    assert (placement.world_size, placement.num_nodes) == (2, 2)
    assert placement.master_addr == "node2"


def test_the_legacy_variables_serve_where_step_variables_are_missing(
    recorded_env: Recorded,
) -> None:
    env = {
        name: value
        for name, value in recorded_env("uneven-step").items()
        if not name.startswith("SLURM_STEP_") or name == "SLURM_STEP_ID"
    }
    assert read_placement(env) == read_placement(recorded_env("uneven-step"))


def test_a_batch_script_with_one_task_may_train(recorded_env: Recorded) -> None:
    env = {**recorded_env("batch-shell"), "SLURM_NTASKS": "1", "SLURM_TASKS_PER_NODE": "1"}
    placement = read_placement(env)
    assert (placement.method, placement.world_size, placement.job_id) == ("single", 1, "2")


def test_torchrun_is_read_with_its_second_agent(recorded_env: Recorded) -> None:
    placement = read_placement(recorded_env("torchrun"))
    assert placement.method == "torchrun"
    assert (placement.rank, placement.world_size) == (3, 4)
    assert (placement.local_rank, placement.local_world_size) == (1, 2)
    assert (placement.node_rank, placement.num_nodes) == (1, 2)
    assert placement.tasks_per_node == (2, 2)
    assert (placement.master_addr, placement.master_port) == ("127.0.0.1", 12399)
    assert placement.job_id is None


def test_torchrun_in_a_step_wins_over_slurm(recorded_env: Recorded) -> None:
    inside = {**recorded_env("small-step"), **recorded_env("torchrun"), "SLURM_RESTART_COUNT": "2"}
    placement = read_placement(inside)
    assert placement.method == "torchrun"
    assert (placement.rank, placement.world_size) == (3, 4)
    assert (placement.job_id, placement.restart_count) == ("2", 2)


def test_a_step_with_several_tasks_wins_over_inherited_ranks(
    recorded_env: Recorded,
) -> None:
    inherited = {**recorded_env("torchrun"), **OPENMPI, **recorded_env("uneven-step")}
    placement = read_placement(inherited)
    assert (placement.method, placement.rank, placement.world_size) == ("slurm", 6, 8)


def test_ranks_by_hand_without_a_local_rank_are_refused() -> None:
    with pytest.raises(ClusterError, match="LOCAL_RANK is not"):
        read_placement({"RANK": "1", "WORLD_SIZE": "4", "MASTER_ADDR": "a"})


def test_the_local_cluster_is_slurm_on_the_loopback(recorded_env: Recorded) -> None:
    env = {**recorded_env("uneven-step"), "HPCRUN_LOCAL_CLUSTER": "1"}
    del env["SLURM_STEP_ID"]
    placement = read_placement(env)
    assert (placement.method, placement.rank, placement.node_rank) == ("local", 6, 2)
    assert placement.master_addr == "127.0.0.1"


def test_no_launcher_is_a_single_rank() -> None:
    placement = read_placement({"PATH": "/bin", "WORLD_SIZE": "1"})
    assert (placement.method, placement.rank, placement.world_size) == ("single", 0, 1)


@pytest.mark.parametrize(
    ("recording", "own"),
    [("gpus-per-task", True), ("map-gpu", True), ("one-gpu-step", False), ("shared", False)],
)
def test_gpus_bound_to_each_task_differ_from_shared_ones(
    recording: str, own: bool, recorded_env: Recorded
) -> None:
    assert read_placement(recorded_env(recording)).own_devices is own


def test_a_task_of_an_array_goes_by_array_and_task(recorded_env: Recorded) -> None:
    env = recorded_env("gpus-per-task")
    assert env["SLURM_JOB_ID"] != env["SLURM_ARRAY_JOB_ID"]
    assert job_id(env) == "3_1"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("SLURM_PROCID", "six"),
        ("SLURM_LOCALID", "-1"),
        ("SLURM_NODEID", "3"),
        ("SLURM_NODEID", ""),
        ("SLURM_STEP_NUM_TASKS", "0"),
        ("SLURM_RESTART_COUNT", "1.5"),
        ("MASTER_PORT", "70000"),
    ],
)
def test_a_malformed_variable_is_named(name: str, value: str, recorded_env: Recorded) -> None:
    with pytest.raises(ClusterError, match=name):
        read_placement({**recorded_env("uneven-step"), name: value})


def test_a_step_without_counts_of_tasks_is_refused(recorded_env: Recorded) -> None:
    env = recorded_env("uneven-step")
    del env["SLURM_STEP_TASKS_PER_NODE"], env["SLURM_TASKS_PER_NODE"]
    with pytest.raises(ClusterError, match="SLURM_STEP_TASKS_PER_NODE"):
        read_placement(env)


@pytest.mark.parametrize("number", ["-5", "-6", "4294967290", "4294967291", ""])
def test_only_a_number_that_srun_gave_makes_a_step(number: str, recorded_env: Recorded) -> None:
    env = {**recorded_env("batch-shell"), "SLURM_STEP_ID": number}
    with pytest.raises(ClusterError, match="8 tasks without srun"):
        read_placement(env)
    assert read_placement({**env, **recorded_env("torchrun")}).rank == 3


def test_torchrun_in_a_batch_script_numbers_the_ranks(recorded_env: Recorded, version: str) -> None:
    env = recorded_env("batch-shell")
    assert env.get("SLURM_STEP_ID") == ("-5" if version == "26.05" else None)
    assert read_placement({**env, **recorded_env("torchrun")}).method == "torchrun"
    with pytest.raises(ClusterError, match="8 tasks without srun"):
        read_placement(env)


def test_master_addr_of_the_environment_is_honored_in_a_step(recorded_env: Recorded) -> None:
    env = recorded_env("uneven-step")
    assert read_placement({**env, "MASTER_ADDR": "node1i"}).master_addr == "node1i"
    # The address that an outer torchrun left does not work on another node.
    for loopback in ("127.0.0.1", "localhost"):
        assert read_placement({**env, "MASTER_ADDR": loopback}).master_addr == "node1"


HYDRA = {
    "PMI_RANK": "5",
    "PMI_SIZE": "8",
    "MPI_LOCALRANKID": "1",
    "MPI_LOCALNRANKS": "4",
}


@pytest.mark.parametrize("given", [OPENMPI, HYDRA])
def test_mpirun_is_refused_with_the_remedy(recorded_env: Recorded, given: dict[str, str]) -> None:
    # The proxies of an mpirun are a step with one task per node.
    for outer in ({}, recorded_env("small-step"), recorded_env("batch-shell")):
        with pytest.raises(ClusterError, match="start the ranks with srun or torchrun"):
            read_placement({**outer, **given})


def test_pmi_of_srun_is_no_mpirun(recorded_env: Recorded) -> None:
    pmi = {"PMI_RANK": "6", "PMI_SIZE": "8"}
    assert read_placement({**recorded_env("uneven-step"), **pmi}).method == "slurm"
    assert read_placement({**recorded_env("small-step"), **pmi}).method == "slurm"


def test_pmi_without_a_local_rank_is_refused() -> None:
    with pytest.raises(ClusterError, match="PMI_SIZE=8") as refusal:
        read_placement({"PMI_RANK": "5", "PMI_SIZE": "8"})
    assert "\n" not in str(refusal.value)
    assert read_placement({"PMI_RANK": "0", "PMI_SIZE": "1"}).method == "single"
