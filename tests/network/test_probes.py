"""The probes on constructed drivers and places: good nodes pass, and a bad fact is reported."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hpcrun.network import probes as node
from hpcrun.network.gpu_probes import product, read_gpus
from hpcrun.network.probes import findings_of, lines, probes, room
from hpcrun.ports.node_checks import Answer, Needs, Record, Same, Timed
from tests.support.pages import code_blocks

GIB = 1 << 30


class Refused(Exception):
    """NVML's error."""


class Driver:
    """The module pynvml of a node with two GPUs, and with changed answers to some questions."""

    NVMLError = Refused
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, lost: int | None = None, **answers: Any) -> None:
        self._lost, self.open = lost, False
        self._answers: dict[str, Any] = {
            "Init": None,
            "Shutdown": None,
            "SystemGetDriverVersion": "550.54",
            "DeviceGetCount": 2,
            "DeviceGetTotalEccErrors": 0,
            "DeviceGetRemappedRows": [0, 0, 0, 0],
            "DeviceGetCurrentClocksThrottleReasons": 1,
            "DeviceGetCurrPcieLinkWidth": 16,
            "DeviceGetMaxPcieLinkWidth": 16,
            **answers,
        }

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index == self._lost:
            raise Refused("GPU is lost")
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return f"GPU-{handle}{handle}"

    def __getattr__(self, name: str) -> Any:
        def answer(*_: object) -> Any:
            value = self._answers[name.removeprefix("nvml")]
            if isinstance(value, Exception):
                raise value
            return value

        return answer


@pytest.fixture
def answers_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that runs a probe of GPUs with a driver, and returns its answers."""

    def run(driver: Any, name: str, needs: Needs | None = None, visible: str = "0,1") -> list[Any]:
        monkeypatch.setitem(sys.modules, "pynvml", driver)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        read_gpus.cache_clear()
        return list(probes()[name].function(needs or Needs(gpus=2)))

    yield run
    read_gpus.cache_clear()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpus", "2 visible"),
        ("ecc", "no uncorrected error"),
        ("throttling", "not slowed down"),
        ("pcie", "x16"),
    ],
)
def test_good_gpus_pass(answers_of: Any, name: str, words: str) -> None:
    found = [one for one in answers_of(Driver(), name) if isinstance(one, Answer)]
    assert {(one.status, one.words) for one in found} == {("pass", words)}


@pytest.mark.parametrize(
    ("name", "answers", "status", "words"),
    [
        ("gpus", {"lost": 1}, "fail", "GPU 1: GPU is lost"),
        ("ecc", {"DeviceGetTotalEccErrors": 2}, "fail", "2 uncorrected"),
        ("ecc", {"DeviceGetTotalEccErrors": Refused()}, "unknown", "reports no ECC"),
        ("ecc", {"DeviceGetRemappedRows": [0, 0, 1, 1]}, "fail", "could not be replaced"),
        ("ecc", {"DeviceGetRemappedRows": [0, 0, 1, 0]}, "warn", "not yet replaced"),
        ("throttling", {"DeviceGetCurrentClocksThrottleReasons": 0x40}, "fail", "heat"),
        ("throttling", {"DeviceGetCurrentClocksThrottleReasons": 0x80}, "fail", "power supply"),
        ("throttling", {"DeviceGetCurrentClocksThrottleReasons": 0x20}, "warn", "0x20"),
        ("pcie", {"DeviceGetCurrPcieLinkWidth": 8}, "warn", "8 of 16"),
        ("pcie", {"DeviceGetCurrPcieLinkWidth": 4}, "fail", "4 of 16"),
        ("pcie", {"Init": Refused("version mismatch")}, "unknown", "does not start: version"),
    ],
)
def test_a_bad_gpu_is_reported(
    answers_of: Any, name: str, answers: dict[str, Any], status: str, words: str
) -> None:
    first = answers_of(Driver(**answers), name)[0]
    assert first.status == status
    assert words in first.words


def test_missing_gpus_and_a_missing_library_are_reported(answers_of: Any) -> None:
    assert "1 of 2 GPUs are visible" in answers_of(Driver(), "gpus", visible="0")[0].words
    assert answers_of(None, "ecc")[0] == Answer(
        "unknown", "nvidia-ml-py is not installed", "pip install 'hpcrun[gpu]'"
    )
    assert answers_of(None, "ecc", Needs(gpus=0)) == []


@pytest.mark.parametrize(
    ("listed", "indices"),
    [("1", [1]), ("GPU-11", [1]), ("1,0", [1, 0]), ("0,-1,1", [0]), ("MIG-a", [0, 1]), ("", [])],
)
def test_only_the_visible_gpus_count(answers_of: Any, listed: str, indices: list[int]) -> None:
    answers_of(Driver(), "gpus", visible=listed)
    assert [device["index"] for device in read_gpus()["devices"]] == indices


@pytest.mark.parametrize(
    ("free", "files", "status", "words"),
    [
        (9 * GIB, 10, "pass", "9 GiB free"),
        (9 * GIB, None, "pass", "9 GiB free"),
        (500 << 20, 10, "warn", "500 MiB free"),
        (1 << 20, 10, "fail", "1 MiB free"),
        (9 * GIB, 0, "fail", "no free inodes"),
    ],
)
def test_little_room_is_reported(free: int, files: int | None, status: str, words: str) -> None:
    found = room("/tmp", free, files, "")
    assert (found.status, found.words) == (status, f"/tmp: {words}")


def test_a_wrong_product_is_reported() -> None:
    good = {"device": "cuda:0", "digest": "00", "wrong": 0, "name": "H100", "seconds": 0.1}
    needs = Needs(gpus=1)
    same, answer, timed = product(good, needs)
    assert (same, timed.of) == (Same("product", "00", same.remedy, of="cuda:0"), "cuda:0")  # type: ignore[union-attr]
    assert answer == Answer("pass", "exact on cuda:0")
    statuses = [
        one.status
        for found in (good | {"wrong": 3}, {"device": "cuda:0", "problem": "CUDA error"})
        for one in product(found, needs)
        if isinstance(one, Answer)
    ]
    assert statuses == ["fail", "fail"]


def found(**answers_of: Record) -> list[tuple[str, tuple[str, ...], str]]:
    """Return nodes, status and words of the findings of one check."""
    listed = findings_of({node: [("x", record)] for node, record in answers_of.items()})
    return [(one.status, one.nodes, one.words) for one in listed]


def test_a_value_that_differs_from_most_is_of_its_node() -> None:
    a, b = Same("nccl", "2.21", "", "fail"), Same("nccl", "2.20", "", "fail", of="cuda:0")
    assert found(n1=a, n2=a, n3=a) == [("pass", (), "equal: nccl 2.21")]
    expected = "cuda:0: nccl is 2.20, on most nodes 2.21"
    assert found(n1=a, n2=b, n3=a) == [("fail", ("n2",), expected)]
    assert found(n1=a, n2=b) == [("fail", (), "nccl differs: n1 has 2.21, n2 has 2.20")]


def test_a_slow_device_is_compared_with_its_own_model() -> None:
    fast, slow = Timed("H100", 0.1, "", "cuda:0"), Timed("H100", 0.5, "", "cuda:1")
    words = "cuda:1 takes 5.00 times as long as the best H100"
    assert found(n1=fast, n2=slow, n3=Timed("A100", 9.0, "")) == [("warn", ("n2",), words)]


def test_what_is_true_everywhere_has_its_own_status() -> None:
    lacks, has = Answer("fail", "no torch", "", everywhere="warn"), Answer("pass", "yes")
    assert [one[0] for one in found(n1=lacks, n2=has)] == ["fail", "pass"]
    assert [one[0] for one in found(n1=lacks, n2=lacks)] == ["warn", "warn"]


def test_the_report_has_lines_for_checks_and_bad_nodes() -> None:
    good, bad = Answer("pass", "enough"), Answer("warn", "few", "raise it")
    answers_of = {
        "n1": [("limits", good), ("space", good)],
        "n2": [("limits", bad), ("space", good)],
    }
    assert lines(findings_of(answers_of)) == [
        "warn     limits  n2: few; raise it",
        "pass     space   enough",
    ]


PAGE = Path(__file__).parents[2] / "docs" / "preflight.md"


def test_the_probe_of_the_page_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = code_blocks(PAGE.read_text(), "python")
    monkeypatch.setattr(node, "_PROBES", {})
    exec(example, dict(vars(node)))
    assert [one.words for one in probes()["swap"].function(Needs())]


# The probes of gpu_probes read GPUs or an image, or import torch, and have their own tests.
OF_THE_NODE = [name for name, one in probes().items() if one.function.__module__ == node.__name__]


@pytest.mark.parametrize("name", OF_THE_NODE)
def test_each_probe_of_the_node_answers_here(name: str, tmp_path: Path) -> None:
    needs = Needs(gpus=0, run=str(tmp_path), hosts=["localhost"])
    found = list(probes()[name].function(needs))
    # The MTU of loopback is of no interest.
    assert found or name == "mtu"


# No process may write a byte into a file.
UNWRITABLE = """
import json, resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from hpcrun.network import probes as node
spaces = [one.words for one in node.space(node.Needs(run=sys.argv[1]))]
print(json.dumps([spaces, node.write(sys.argv[1], "n1")]))
"""


def test_a_node_that_can_write_nowhere_still_answers(tmp_path: Path) -> None:
    command = [sys.executable, "-c", UNWRITABLE, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    spaces, written = json.loads(done.stdout)
    assert [words.partition(" ")[0] for words in spaces] == ["/dev/shm:", "temporary", "run"]
    assert written == {"problem": "File too large"}
