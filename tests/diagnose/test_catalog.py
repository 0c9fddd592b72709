"""Every entry of the catalog matches its own excerpt; unseen excerpts get the right cause or none."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from hpcrun.diagnose.explanations import explained
from hpcrun.diagnose.finding import FailureFinding, find_cause
from hpcrun.diagnose.read_log import labeled
from hpcrun.run.failures.catalog import entries, match, may_match

_LOGS = Path(__file__).with_name("logs")


def _read(*names: str) -> list[Any]:
    return [yaml.safe_load((_LOGS / f"{name}.yaml").read_text()) for name in names]


EXCERPTS: dict[str, str] = {}
for part in _read("catalog", *(f"catalog-{n}" for n in range(2, 6))):
    EXCERPTS |= part
FORMS: dict[str, list[str]] = _read("forms")[0]
HEALTHY: dict[str, str] = _read("healthy")[0]
UNSEEN: list[dict[str, Any]] = [item for part in _read("unseen", "unseen-2") for item in part]


def diagnosis(log: str) -> FailureFinding | None:
    """Return the cause in ``log``."""
    return find_cause(labeled(text, "job.log", at) for at, text in enumerate(log.splitlines(), 1))


def test_the_catalog_has_80_entries_with_an_excerpt_each() -> None:
    assert len(entries()) >= 80
    assert {entry.id for entry in entries()} == set(EXCERPTS)
    assert len({entry.id for entry in entries()}) == len(entries())


@pytest.mark.parametrize("name", EXCERPTS)
def test_an_entry_finds_its_excerpt(name: str) -> None:
    found = diagnosis(EXCERPTS[name])
    assert found is not None
    assert found.id == name
    assert found.evidence[0].line >= 1
    (entry,) = (entry for entry in entries() if entry.id == name)
    assert entry.search(found.evidence[0].text)


@pytest.mark.parametrize(
    ("name", "log"), [(name, log) for name, logs in FORMS.items() for log in logs]
)
def test_an_entry_finds_other_forms_of_its_message(name: str, log: str) -> None:
    found = diagnosis(log)
    assert found is not None
    assert found.id == name


@pytest.mark.parametrize(
    "label",
    [
        "[rank3]: ",
        " 0: ",
        "node01: ",
        "Rank 3: ",
        "[default3]:[rank11]: ",
        "[1,5]<stderr>:",
        "(RayTrainWorker pid=9, ip=10.0.0.2) ",
        "2026-11-23T08:00:00.1Z stderr F ",
        "2026-03-01 10:00:00,123 ",
        "[2026-03-01 10:00:00] node7: ",
        "\x1b[31m",
    ],
)
def test_no_label_before_the_lines_hides_a_cause(label: str) -> None:
    for name, log in EXCERPTS.items():
        found = diagnosis("\n".join(f"{label}{line}" for line in log.splitlines()))
        assert found is not None, name
        assert found.id == name


@pytest.mark.parametrize("entry", entries(), ids=lambda entry: entry.id)
def test_an_entry_is_complete(entry: Any) -> None:
    assert entry.kind in {
        "input", "program", "environment", "resource", "storage", "network", "hardware", "scheduler",
        "unknown",
    }  # fmt: skip
    assert entry.role in ("initiating", "symptom", "consequence", "teardown")
    assert entry.retry in ("helps", "elsewhere", "unlikely", "never")
    assert entry.source.startswith(("https://github.com/", "recorded with "))
    assert entry.cause
    assert entry.remedy
    assert not entry.cause.endswith(".")


@pytest.mark.parametrize("name", HEALTHY)
def test_a_program_that_went_on_has_no_cause(name: str) -> None:
    found = diagnosis(HEALTHY[name])
    assert found is None, found


def test_the_word_filter_loses_no_line_that_an_entry_matches() -> None:
    logs = [*EXCERPTS.values(), *(item["log"] for item in UNSEEN)]
    logs += [log for logs_of_entry in FORMS.values() for log in logs_of_entry]
    for line in (line for log in logs for line in log.splitlines()):
        if any(entry.search(line) for entry in entries()):
            assert may_match(line), line


def test_unseen_excerpts_come_from_issues_without_an_entry() -> None:
    assert len(UNSEEN) >= 40
    assert not {item["source"] for item in UNSEEN} & {entry.source for entry in entries()}


@pytest.mark.parametrize("item", UNSEEN, ids=lambda item: item["source"].removeprefix("https://"))
def test_no_unseen_excerpt_gets_a_wrong_cause_with_confidence(item: dict[str, Any]) -> None:
    found = diagnosis(item["log"])
    if found is not None and found.confidence != "low":
        assert found.id == item["cause"]


def test_at_least_30_unseen_excerpts_get_the_right_cause() -> None:
    right = [
        item
        for item in UNSEEN
        if item["cause"] and (found := diagnosis(item["log"])) and found.id == item["cause"]
    ]
    assert len(right) >= 30


def test_the_requeue_policy_gets_the_cause_and_a_remedy() -> None:
    told = explained("CUDA out of memory. Tried to allocate 3.20 GiB (GPU 0; 10.76 GiB)")
    assert told is not None
    assert told.startswith(
        "CUDA out of memory. Tried to allocate 3.20 GiB (GPU 0; 10.76 GiB): the memory of a GPU is full; "
    )
    assert explained("the data of call 9 is broken") is None
    # A message about another rank explains nothing.
    assert explained("Connection closed by peer [10.0.0.2]") is None


def test_a_line_without_an_error_matches_nothing() -> None:
    for line in (
        "hpcrun: step 100, loss 2.31",
        "node1:97:176 [0] NCCL INFO Channel 00 : 0[100000] -> 1[200000] via direct shared memory",
        "Epoch 0:   7%|7         | 1/14 [00:00<00:04,  2.61it/s, loss=-6.21]",
        "node1:97:97 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so.",
        "slurmstepd: Exceeded step memory limit at some point.",
        "UserWarning: This DataLoader will create 8 worker processes in total.",
    ):
        assert match(line) is None, line
