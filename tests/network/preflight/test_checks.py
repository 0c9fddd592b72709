"""Each check on constructed facts: good nodes pass, and a bad fact is reported for its node."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hpcrun.network.preflight.checks import JobNeeds
from hpcrun.network.preflight.report import as_data, cause, failures, lines, results, unfit

from .nodes import DEVICE, sound, told

Change = Callable[[dict[str, Any]], object]


def test_sound_nodes_pass_every_check() -> None:
    found = results(sound())
    assert {one.status for one in found} == {"pass"}
    assert {one.check for one in found} >= {
        "gpus",
        "ecc",
        "xid",
        "pcie",
        "gemm",
        "clock",
        "config",
        "mtu",
    }


def xid(number: int, age: float = 60.0) -> Change:
    return lambda facts: facts.update(
        kernel={"xids": [{"bus": "0000:3b:00", "number": number, "age": age}]}
    )


BAD: list[tuple[str, Change, str, str]] = [
    ("gpus", lambda f: f["gpus"].update(visible=0), "fail", "0 of 1 GPUs"),
    ("gpus", lambda f: f["device"].append({"index": 1, "problem": "lost"}), "fail", "GPU 1: lost"),
    ("ecc", lambda f: f["device"][0].update(uncorrected=2), "fail", "2 uncorrected"),
    ("ecc", lambda f: f["device"][0].update(remap_failed=True), "fail", "could not be replaced"),
    ("ecc", lambda f: f["device"][0].update(remap_pending=True), "warn", "not yet replaced"),
    ("ecc", lambda f: f["device"][0].update(uncorrected=None), "unknown", "reports no ECC"),
    ("throttling", lambda f: f["device"][0].update(throttling=0x40), "fail", "heat"),
    ("throttling", lambda f: f["device"][0].update(throttling=0x80), "fail", "power supply"),
    ("throttling", lambda f: f["device"][0].update(throttling=0x20), "warn", "0x20"),
    ("pcie", lambda f: f["device"][0].update(width=8), "warn", "8 of 16"),
    ("pcie", lambda f: f["device"][0].update(width=4), "fail", "4 of 16"),
    ("xid", xid(79), "fail", "fallen off the bus"),
    ("xid", xid(62), "warn", "Xid 62"),
    ("xid", lambda f: f.update(kernel={"problem": "not permitted"}), "unknown", "not permitted"),
    ("gemm", lambda f: f["product"][0].update(wrong=3), "fail", "3 entries"),
    ("gemm", lambda f: f["product"][0].update(digest="01"), "fail", "another product"),
    ("gemm", lambda f: f["product"][0].update(seconds=0.001), "warn", "5.00 times"),
    ("gemm", lambda f: f.update(gemm={"problem": "CUDA error"}), "fail", "CUDA error"),
    ("space", lambda f: f["space"][0].update(free=1 << 20), "fail", "1 MiB free"),
    ("space", lambda f: f["space"][0].update(free=500 << 20), "warn", "500 MiB free"),
    ("space", lambda f: f["space"][0].update(free_files=0), "fail", "no free inodes"),
    ("run directory", lambda f: f.update(write={"problem": "Read-only file system"}), "fail", "Read-only"),
    ("run directory", lambda f: f.update(unseen={"count": 1, "names": ["n1"]}), "fail", "files of n1"),
    ("run directory", lambda f: f.update(write={"seconds": 3.0}), "warn", "3.0 s"),
    ("limits", lambda f: f["limits"].update(files=1024), "warn", "1024 open files"),
    ("limits", lambda f: f["limits"].update(locked=8192 * 1024), "warn", "8192 KiB"),
    ("host names", lambda f: f["names"].update(unresolved=["n9"]), "warn", "n9"),
    ("host names", lambda f: f["names"].update(loopback=True), "warn", "loopback"),
    ("versions", lambda f: f["libraries"].update(nccl="2.20.3"), "fail", "nccl is 2.20.3"),
    ("versions", lambda f: f["gpus"].update(driver="535.1"), "warn", "driver is 535.1"),
    ("config", lambda f: f.update(config={"hash": "cd" * 32}), "fail", "hash is cdcd"),
    ("config", lambda f: f.update(config={"problem": "No such file"}), "fail", "No such file"),
    ("mtu", lambda f: f["mtu"].update(mtu=1500), "warn", "MTU is 1500"),
]  # fmt: skip


@pytest.mark.parametrize(("check", "change", "status", "words"), BAD)
def test_a_bad_fact_is_reported_for_its_node(
    check: str, change: Change, status: str, words: str
) -> None:
    measured = sound()
    change(measured.facts["n2"])
    found = told(measured, check)
    assert [(one.node, one.status) for one in found] == [("n2", status)]
    assert words in found[0].words
    bad = unfit(measured, results(measured))
    assert list(bad) == (["n2"] if status == "fail" else [])


@pytest.mark.parametrize("change", [xid(31), xid(79, age=2 * 86400.0)])
def test_errors_of_programs_and_old_ones_do_not_count(change: Change) -> None:
    measured = sound()
    change(measured.facts["n2"])
    assert told(measured, "xid") == []


def test_an_error_of_a_gpu_of_another_job_does_not_count() -> None:
    measured = sound()
    measured.facts["n2"]["kernel"] = {"xids": [{"bus": "0000:af:00", "number": 79, "age": 1}]}
    assert told(measured, "xid") == []


@pytest.mark.parametrize(
    ("offset", "status"), [(0.4, None), (3.0, "warn"), (-3.0, "warn"), (90.0, "fail")]
)
def test_a_wrong_clock_is_reported(offset: float, status: str | None) -> None:
    measured = sound()
    measured.offsets["n3"] = (offset, 0.001)
    assert [one.status for one in told(measured, "clock")] == ([status] if status else [])


def test_an_uncertain_clock_is_not_blamed() -> None:
    measured = sound()
    measured.offsets["n3"] = (0.9, 0.8)
    assert told(measured, "clock") == []


def test_a_node_that_does_not_answer_is_unfit() -> None:
    measured = sound()
    measured.silent["n3"] = "srun cannot start a task there"
    found = results(measured)
    assert unfit(measured, found) == {"n3": "starts: srun cannot start a task there"}
    assert cause(found, unfit(measured, found)).startswith("preflight on n3: starts: srun cannot")


def test_what_fails_on_every_node_blames_none() -> None:
    measured = sound()
    for facts in measured.facts.values():
        facts["gpus"]["visible"] = 0
    found = results(measured)
    assert len(failures(found)) == 3
    assert unfit(measured, found) == {}
    assert as_data(measured, found)["cause"]


def test_the_only_node_is_blamed_for_its_hardware_and_not_for_the_job_s_files() -> None:
    measured = sound(1)
    measured.facts["n1"]["write"] = {"problem": "Disk quota exceeded"}
    assert unfit(measured, results(measured)) == {}
    measured.facts["n1"]["device"][0]["uncorrected"] = 1
    assert list(unfit(measured, results(measured))) == ["n1"]


def test_two_nodes_that_differ_are_both_named_and_neither_is_blamed() -> None:
    measured = sound(2)
    measured.facts["n2"]["libraries"]["torch"] = "2.5.1"
    (one,) = told(measured, "versions")
    assert (one.node, one.status) == (None, "fail")
    assert "n1 has 2.6.0, n2 has 2.5.1" in one.words
    assert unfit(measured, results(measured)) == {}


def test_without_gpus_and_without_nvml_nothing_fails() -> None:
    measured = sound(1)
    measured.asked = JobNeeds(gpus=None)
    facts = measured.facts["n1"]
    for section in ("device", "kernel"):
        del facts[section]
    facts["gpus"] = {"visible": 0, "problem": "nvidia-ml-py is not installed"}
    assert {one.status for one in results(measured)} == {"pass"}
    facts["gpus"]["visible"] = 1
    unknown = {one.check for one in results(measured) if one.status == "unknown"}
    assert unknown == {"ecc", "xid", "throttling", "pcie"}


def test_the_report_ends_with_the_option_that_leaves_the_node_out() -> None:
    measured = sound()
    measured.facts["n2"]["device"] = [DEVICE | {"uncorrected": 5}]
    text = lines(measured, results(measured))
    assert text[-2:] == ["not fit: n2", "--exclude=n2"]
    assert any(line.startswith("fail     ecc            n2: GPU 0: 5 uncorrected") for line in text)


def test_a_node_without_torch_fails_and_versions_are_not_equal() -> None:
    measured = sound()
    absent = {"problem": "ModuleNotFoundError: No module named 'torch'", "code": 1}
    for node in ("n2", "n1", "n3"):
        facts = measured.facts[node]
        for section in ("libraries", "product"):
            del facts[section]
        facts["gemm"] = absent
        status = "warn" if node == "n3" else "fail"
        found = told(measured, "torch")
        assert {(one.node, one.status) for one in found} == {
            (name, status) for name, known in measured.facts.items() if "gemm" in known
        }
        assert "No module named 'torch'" in found[0].words
        (equal,) = (one for one in results(measured) if one.check == "versions")
        assert equal.words == "equal: python 3.11.2, hpcrun 0.1.0, driver 550.54"
        named = set(unfit(measured, results(measured)))
        assert named == (set() if node == "n3" else {one.node for one in found})
