"""Who starts a preempted job again, from what Slurm's programs print."""

import pytest

from hpcrun.batch.preempting import preempt_mode, requeues_in_grace_time

CONFIG = """\
PreemptMode             = {mode}
PreemptType             = {kind}
PreemptExemptTime       = 00:00:00
SLURM_VERSION           = {version}
"""
PARTITION = """\
PartitionName=batch
   OverTimeLimit=NONE PreemptMode={}
   State=UP TotalCPUs=32 TotalNodes=2 SelectTypeParameters=NONE
"""


def config(version: str = "26.05.3", mode: str = "REQUEUE", kind: str = "partition_prio") -> str:
    return CONFIG.format(version=version, mode=mode, kind=f"preempt/{kind}")


@pytest.mark.parametrize(
    ("version", "does"),
    [("22.05.8", False), ("23.11.10", False), ("24.05.0", True), ("24.11.3-1", True), ("?", False)],
)
def test_slurm_requeues_what_ends_in_its_grace_time_since_24_05(version: str, does: bool) -> None:
    assert requeues_in_grace_time(config(version)) is does


def test_the_partition_decides_over_the_default() -> None:
    assert preempt_mode(config(mode="REQUEUE"), PARTITION.format("CANCEL")) == "CANCEL"
    assert preempt_mode(config(mode="GANG,SUSPEND"), PARTITION.format("GANG,REQUEUE")) == "REQUEUE"


@pytest.mark.parametrize(("mode", "becomes"), [("OFF", "REQUEUE"), ("CANCEL", "CANCEL")])
def test_a_qos_without_a_mode_of_its_own_has_the_clusters(mode: str, becomes: str) -> None:
    shown = f"QOS Records\n\nQOS=low(3)\n    Priority=0\n    PreemptMode={mode}\n"
    assert preempt_mode(config(kind="qos"), shown) == becomes


def test_a_qos_that_nobody_describes_is_unknown() -> None:
    assert preempt_mode(config(kind="qos"), "No association data") is None
