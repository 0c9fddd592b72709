"""The choice of a step's nodes, and the options and variables for them."""

from __future__ import annotations

import subprocess

import pytest

from hpcrun.nodes.agent import must_requeue
from hpcrun.nodes.spare_probe import EVERY, PROBE, SpareProbe, fault_of, probe_command
from hpcrun.nodes.step_nodes import (
    JobShape,
    choose_nodes,
    replacements,
    step_options,
    step_variables,
)
from hpcrun.run.directory import create

FOUR = JobShape(("node1", "node2", "node3", "node4"), 3, 2)
ENVIRON = {
    "SLURM_JOB_NODELIST": "node[1-4]",
    "SLURM_NNODES": "4",
    "SLURM_NTASKS": "8",
    "SLURM_TASKS_PER_NODE": "2(x4)",
    "SLURM_JOB_CPUS_PER_NODE": "16(x4)",
    "SLURM_JOB_ID": "12",
}


@pytest.mark.parametrize(
    ("bad", "before", "chosen"),
    [
        ((), (), ("node1", "node2", "node3")),
        (("node2",), ("node1", "node2", "node3"), ("node1", "node3", "node4")),
        (("node4",), ("node1", "node2", "node3"), ("node1", "node2", "node3")),
        # A node that was replaced and is fit does not come back while the others live.
        ((), ("node1", "node3", "node4"), ("node1", "node3", "node4")),
        (("node1", "node2"), ("node1", "node2", "node3"), None),
    ],
)
def test_a_spare_takes_the_place_of_a_bad_node(bad, before, chosen):
    assert choose_nodes(FOUR, bad, before) == chosen


@pytest.mark.parametrize(
    ("bad", "count"), [(0, 4), (1, 3), (2, 2), (3, None)], ids=["all", "one", "two", "three"]
)
def test_a_step_shrinks_to_an_allowed_count(bad, count):
    shape = JobShape(FOUR.nodes, "2-4", 2)
    chosen = choose_nodes(shape, shape.nodes[:bad])
    assert (chosen and len(chosen)) == count


def test_a_suspect_is_used_if_others_are_too_few():
    before = ("node1", "node2", "node3")
    assert choose_nodes(FOUR, (), before, ["node2"]) == ("node1", "node3", "node4")
    assert choose_nodes(FOUR, ["node4"], before, ["node2"]) == before


def test_each_replacement_names_both_nodes():
    before = ("node1", "node2", "node3")
    assert replacements(before, ("node1", "node3", "node4")) == [("node2", "node4")]
    assert replacements(before, ("node1", "node3")) == [("node2", None)]
    assert replacements((), before) == []


def test_variables_describe_only_the_nodes_of_the_step():
    variables = step_variables(ENVIRON, FOUR, ("node1", "node3", "node4"))
    assert variables == {
        "SLURM_JOB_NODELIST": "node1,node3,node4",
        "SLURM_NODELIST": "node1,node3,node4",
        "SLURM_JOB_NUM_NODES": "3",
        "SLURM_NPROCS": "6",
        "SLURM_NNODES": "3",
        "SLURM_NTASKS": "6",
        "SLURM_TASKS_PER_NODE": "2(x3)",
        "SLURM_JOB_CPUS_PER_NODE": "16(x3)",
        "SLURM_JOB_ID": "12",
    }


def test_unequal_nodes_keep_their_numbers_of_cores():
    unequal = {**ENVIRON, "SLURM_JOB_CPUS_PER_NODE": "16(x3),8"}
    variables = step_variables(unequal, FOUR, ("node1",))
    assert variables["SLURM_JOB_CPUS_PER_NODE"] == "16(x3),8"
    assert variables["SLURM_TASKS_PER_NODE"] == "2"


def test_only_a_later_step_shares_resources_with_a_lost_step():
    first = step_options(FOUR, FOUR.nodes[:3], overlap=False)
    assert first == [
        "--no-kill",
        "--nodes=3",
        "--ntasks=6",
        "--ntasks-per-node=2",
        "--nodelist=node1,node2,node3",
    ]
    assert step_options(FOUR, FOUR.nodes[:3], overlap=True) == [*first, "--overlap"]


@pytest.mark.parametrize(
    ("changed", "requeues"),
    [
        ({}, True),
        ({"node": "node3"}, False),
        ({"BatchHost": "node2"}, False),
        ({"JobState": "COMPLETING"}, False),
        ({"Restarts": "1"}, False),
        ({"NodeList": "(null)"}, False),
    ],
    ids=["lost", "not-the-first", "host-lives", "ends", "newer-start", "no-nodes"],
)
def test_one_agent_requeues_a_job_without_its_batch_host(changed, requeues):
    facts = {"BatchHost": "node1", "NodeList": "node[2-4]", "JobState": "RUNNING", "Restarts": "0"}
    facts |= changed
    assert must_requeue(facts.pop("node", "node2"), facts, "0") is requeues


def probed(*messages: dict[str, object]) -> SpareProbe:
    probe = SpareProbe()
    probe.orders(1.0, ["true"], [])
    for message in messages:
        probe.hear(message)
    return probe


def test_a_spare_is_probed_again_after_a_while():
    probe = SpareProbe()
    assert [order for order, _ in probe.orders(1.0, ["true"], [("10.0.0.1", 1)])] == [
        "start",
        "reach",
    ]
    probe.hear({"ended": PROBE, "code": 0, "output": '{"unfit": {}}'})
    assert (probe.orders(EVERY, ["true"], []), probe.running) == ([], False)
    assert [order for order, _ in probe.orders(EVERY + 1.0, ["true"], [])] == ["start"]


@pytest.mark.parametrize(
    ("report", "fault"),
    [
        ('{"unfit": {"local0": "gpus: 1 of 2 is missing"}}', "gpus: 1 of 2 is missing"),
        ('{"unfit": {}}', None),
        ("Traceback: no module", None),
        ("[]", None),
    ],
)
def test_a_spare_is_unfit_by_its_own_report(report, fault):
    assert fault_of(report) == fault
    assert probed({"ended": PROBE, "code": 1, "output": report}).fault(2.0) == fault


def test_a_spare_without_a_network_is_unfit_after_two_tries():
    none: dict[str, object] = {"reached": False}
    assert probed(none).fault(2.0) is None
    assert "does not reach" in str(probed(none, none).fault(2.0))
    assert probed(none, {"reached": True}, none).fault(2.0) is None


def test_a_probe_that_hangs_makes_the_spare_unfit():
    assert "has not ended" in str(probed().fault(1000.0))
    assert probed({"stopped": PROBE}).fault(1000.0) is None


def test_a_spare_reports_missing_gpus_about_itself(tmp_path):
    run = create(tmp_path / "a", "command: []\njob:\n  cpu: true\n", {})

    def report(gpus: int) -> str:
        command = probe_command(run.path, gpus)
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout

    assert fault_of(report(0)) is None
    assert str(fault_of(report(64))).startswith("gpus: ")
