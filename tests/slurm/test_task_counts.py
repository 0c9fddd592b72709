"""Tasks per node in Slurm's notation."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrun.errors import ClusterError
from hpcrun.run.attempt import TASKS, other_tasks
from hpcrun.slurm.placement import tasks_per_node


@pytest.mark.parametrize(
    ("text", "tasks"),
    [
        ("4(x2),2", [4, 4, 2]),
        ("3(x2),2", [3, 3, 2]),
        ("1", [1]),
        ("2,1(x3),2", [2, 1, 1, 1, 2]),
        ("8(x1)", [8]),
    ],
)
def test_counts_are_repeated_in_order(text: str, tasks: list[int]) -> None:
    assert tasks_per_node(text) == tasks


@given(st.lists(st.tuples(st.integers(1, 128), st.integers(1, 9)), min_size=1))
def test_any_run_lengths_are_read_back(runs: list[tuple[int, int]]) -> None:
    text = ",".join(f"{count}(x{times})" if times > 1 else str(count) for count, times in runs)
    assert tasks_per_node(text) == [count for count, times in runs for _ in range(times)]


@pytest.mark.parametrize("text", ["", "4(x2", "4x2", "4(x0)", "four", "4,,2", "-1", "4(x2)2"])
def test_other_text_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ClusterError, match=r"4\(x2\),2"):
        tasks_per_node(text)


@pytest.mark.parametrize(
    ("wanted", "started", "part"),
    [
        ("2", 1, "the job has 1 task, the config says 2 ranks;"),
        ("1", 4, "the job has 4 tasks, the config says 1 rank;"),
        ("4", 4, None),
        (None, 4, None),
        ("", 1, None),
    ],
)
def test_another_number_of_tasks_is_named(
    wanted: str | None, started: int, part: str | None
) -> None:
    line = other_tasks({} if wanted is None else {TASKS: wanted}, started)
    assert (line is None) == (part is None)
    assert part is None or part in str(line)
