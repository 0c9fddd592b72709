"""The restart of a preempted job, by Slurm or by hpcrun, from the output of Slurm's programs."""

from pathlib import Path

import pytest

from hpcrun.job.restart.requeue import preempt_mode, requeues_in_grace_time

RECORDED = Path(__file__).resolve().parents[1] / "slurm" / "recorded"

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
def test_slurm_since_24_05_requeues_in_the_grace_time(version: str, does: bool) -> None:
    assert requeues_in_grace_time(config(version)) is does


def test_the_partition_decides_over_the_default() -> None:
    assert preempt_mode(config(mode="REQUEUE"), PARTITION.format("CANCEL")) == "CANCEL"
    assert preempt_mode(config(mode="GANG,SUSPEND"), PARTITION.format("GANG,REQUEUE")) == "REQUEUE"


@pytest.mark.parametrize("version", ["22.05", "24.11", "26.05"])
@pytest.mark.parametrize(
    ("qos", "mode"),
    [("requeue", "REQUEUE"), ("cancel", "CANCEL"), ("plain", "SUSPEND"), ("unknown", None)],
)
def test_the_qos_decides_or_without_a_mode_the_cluster(
    version: str, qos: str, mode: str | None
) -> None:
    printed = (RECORDED / version / "show-config-qos.txt").read_text()
    # A mode that no recorded QOS has.
    clusters = printed.replace("= REQUEUE\n", "= GANG,SUSPEND\n")
    assert clusters != printed
    shown = (RECORDED / version / f"qos-{qos}.txt").read_text()
    assert preempt_mode(clusters, shown) == mode
    assert requeues_in_grace_time(printed) is (version != "22.05")
