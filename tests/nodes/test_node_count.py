"""The number of nodes of a step, where ``job.nodes`` is a range or nodes are lost."""

import pytest

from hpcrun.job.srun import launch_config
from hpcrun.nodes.step_nodes import count_options, nodes_for_step
from hpcrun.run.directory import create
from tests.support.training.runs import config_text


@pytest.mark.parametrize(
    ("nodes", "counts"),
    [
        (3, [0, 0, 0, 3, 3]),
        ("2-3", [0, 0, 2, 3, 3]),
        ("1-4", [0, 1, 2, 3, 4]),
        (1, [0, 1, 1, 1, 1]),
    ],
)
def test_a_step_has_all_living_nodes_of_the_range(nodes, counts):
    assert [nodes_for_step(nodes, living) for living in range(5)] == counts


def test_a_step_sets_its_number_of_nodes_and_tasks():
    assert count_options(3, 2) == ["--nodes=3", "--ntasks=6", "--ntasks-per-node=2"]


def test_srun_gets_the_tasks_per_node_of_a_range(tmp_path):
    text = config_text(
        "job.nodes=2-4", "job.gpus=2", "job.srun_args=[--label]", "train.batch_size=64"
    )
    run = create(tmp_path / "run", text, {"created": 0.0})
    assert list(launch_config(run).job.srun_args) == ["--ntasks-per-node=2", "--label"]
