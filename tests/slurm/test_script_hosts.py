"""The list of nodes that a script of the local cluster gets has names that other libraries can connect to."""

import socket

import pytest

from hpcrun.run.attempt import Attempt
from hpcrun.slurm.local.job_files import (
    JobRequest,
    job_environment,
    script_environment,
    step_environment,
)
from hpcrun.slurm.notation import expand
from hpcrun.slurm.placement import read_placement


def first_of(hosts):
    """Return the first node as JAX, Lightning and the usual shell lines read it from the list."""
    prefix, bracket, rest = hosts.partition("[")
    return prefix + rest.replace(",", "-").split("-")[0] if bracket else prefix.split(",")[0]


@pytest.mark.parametrize(("nodes", "tasks"), [(1, 1), (1, 3), (2, 1), (12, 2)])
def test_a_script_can_connect_to_every_node(tmp_path, nodes, tasks):
    request = JobRequest(
        "17", str(tmp_path), [], nodes, tasks, None, None, None, 1.0, 1.0, 1.0, [], {}, []
    )
    task = job_environment(request, Attempt("17", 0)) | step_environment(request, nodes * tasks - 1)
    script = task | script_environment(task)
    for name in ("SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"):
        assert first_of(script[name]) == "127.0.0.1"
    assert len(expand(script["SLURM_JOB_NODELIST"])) == nodes
    for host in expand(script["SLURM_JOB_NODELIST"]):
        with socket.socket() as listener, socket.socket() as client:
            listener.bind((host, 0))
            listener.listen()
            client.connect(listener.getsockname())
    here, there = read_placement(script), read_placement(task)
    assert (here.rank, here.world_size, here.node_rank) == (there.rank, there.world_size, nodes - 1)
    assert script["SLURMD_NODENAME"] == task["SLURMD_NODENAME"]


def test_a_job_of_slurm_keeps_its_nodes():
    assert script_environment({"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_ID": "3"}) == {}
    assert script_environment({}) == {}
