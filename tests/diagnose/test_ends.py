"""Ends by a scheduler or a person, runs that went on after an error, and the place of a cause."""

import pytest

from hpcrun.diagnose.finding import FailureFinding, find_cause
from hpcrun.diagnose.read_log import LogLine, labeled

CANCELLED = "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T03:39:32 DUE to SIGNAL Terminated ***"
MOMENT = labeled(CANCELLED, "batch.log", 1).time or 0.0
REQUEUED = (
    "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026-11-22T03:39:20 DUE TO JOB REQUEUE ***"
)
TRACE = (
    "Traceback (most recent call last):",
    '  File "train.py", line 7, in fit',
    "ValueError: batch 9 is odd",
)


def found_in(*texts: str) -> FailureFinding | None:
    """Return the finding in a log of ``texts``."""
    return find_cause(labeled(text, "job.log", at) for at, text in enumerate(texts, 1))


def found_with_cancel(*texts: str, until: float) -> FailureFinding:
    """Return the finding of a cancelled job whose log of a rank changed last at ``until``."""
    rank = [labeled(text, "rank-00000.log", at, 0, until=until) for at, text in enumerate(texts, 1)]
    found = find_cause([*rank, labeled(CANCELLED, "batch.log", 1)])
    assert found is not None
    return found


def test_an_error_before_a_cancellation_stays_the_cause() -> None:
    found = found_with_cancel(*TRACE, until=MOMENT - 60)
    assert (found.id, found.rank) == ("exception", 0)
    assert found.folded == ()
    assert found.notes[0].startswith("also seen: a person or an administrator cancelled the job")
    found = found_with_cancel("OSError: [Errno 122] Disk quota exceeded", until=MOMENT + 5)
    assert found.id == "quota"


def test_errors_of_unknown_time_do_not_follow_from_a_cancellation() -> None:
    found = found_with_cancel(*TRACE, until=MOMENT + 1)
    assert (found.id, found.folded) == ("slurm-cancelled", ())
    assert found.notes == (
        "an error before the end: ValueError: batch 9 is odd (rank-00000.log:3)",
    )
    later = found_in(CANCELLED, *TRACE)
    assert later is not None
    assert (later.id, dict(later.folded)) == ("slurm-cancelled", {"exception": 1})
    assert later.notes == ()


def test_memory_that_ran_out_is_reported_after_the_cancellation() -> None:
    found = found_in(
        "RuntimeError: DataLoader worker (pid 77) is killed by signal: Killed.",
        CANCELLED,
        "slurmstepd: error: Detected 1 oom_kill event in StepId=7.batch. Some tasks have been OOM Killed.",
    )
    assert found is not None
    assert found.id == "slurm-out-of-memory"


@pytest.mark.parametrize("label", ["", "sweep/run-003: "])
def test_a_requeue_by_hpcrun_is_not_by_a_person(label: str) -> None:
    own = f"hpcrun: {label}restart 1 after crashes (3 allowed)"
    found = found_in("Killed", own, REQUEUED)
    assert found is not None
    assert (found.id, found.notes) == ("rank-killed", ())
    assert found_in("step 1 loss 2", own, REQUEUED) is None
    found = found_in("step 1 loss 2", REQUEUED)
    assert found is not None
    assert found.id == "slurm-requeued"


UCX = "[168.4]  [n1:11:0] ib_log.c:246 UCX  ERROR mlx5_0: ibv_create_cq() failed: Cannot allocate memory"
NCCL = "n1:88:90 [0] misc/ibvwrap.cc:130 NCCL WARN Call to ibv_create_qp failed"
THREAD = (
    "Exception in thread Thread-3:",
    *TRACE,
    "",
    "During handling of the above exception,",
    *TRACE,
)
AFTER = {
    "rows of a benchmark": (UCX, "", "# Size       Avg Latency(us)", "1          0.23"),
    "rows of epochs": (
        "ERROR:root:Connection reset by peer",
        "epoch,train,valid",
        "1,0.81,0.92",
        "2,0.71,0.88",
    ),
    "a line after a message of a library": (NCCL, "average bus bandwidth : 181 GB/s"),
    "labels of ranks": (f"[rank3]: {UCX}", "[rank3]: wrote the weights to model.bin"),
    "lines after a message of a logger": (
        "2026-03-01 10:00:00 ERROR mine: [Errno 104] Connection reset by peer",
        "read 100 files",
        "read 200 files",
        "wrote summary.csv",
    ),
    "an exception of a thread": (*THREAD, "The network is now trained."),
}


@pytest.mark.parametrize("name", AFTER)
def test_output_after_an_error_shows_that_the_program_continued(name: str) -> None:
    assert found_in(*AFTER[name]) is None


@pytest.mark.parametrize(
    ("expected", "texts"),
    [
        ("locked-memory", (UCX, "please set the limit", "", "------")),
        (
            "infiniband-resources",
            (NCCL, "starting", "srun: error: n1: task 0: Exited with exit code 1"),
        ),
        ("exception", (*TRACE, "1  0.2", "2  0.3", "3  0.4")),
        ("command-missing", ("job.sh: line 3: torchrun: command not found", "end of the job")),
        ("exception", ("Exception in thread Thread-3:", *TRACE, *TRACE, "wrote a report")),
    ],
)
def test_output_does_not_hide_a_failure(expected: str, texts: tuple[str, ...]) -> None:
    found = found_in(*texts)
    assert found is not None
    assert found.id == expected


FULL = "OSError: [Errno 28] No space left on device"


@pytest.mark.parametrize(
    ("expected", "frame"),
    [
        ("shared-memory-full", "    sl = self._semlock = _multiprocessing.SemLock("),
        (
            "shared-memory-full",
            '  File "/usr/lib/python3.11/multiprocessing/shared_memory.py", line 114',
        ),
        ("shared-memory-full", "    return torch.UntypedStorage._new_shared(size)"),
        ("disk-full", '    with open("metrics.csv", "a") as stream:'),
    ],
)
def test_full_shared_memory_is_told_from_a_full_disk(expected: str, frame: str) -> None:
    trace = (
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in <module>',
        frame,
        FULL,
    )
    for label in ("", "[rank2]: ", "node01: "):
        found = found_in(*(label + text for text in trace))
        assert found is not None
        assert found.id == expected
    record = LogLine(FULL, "failure.json", 0, 1, "n1", 5.0, failure=True, frames="\n".join(trace))
    found = find_cause([record])
    assert found is not None
    assert (found.id, "/dev/shm" in found.cause) == (expected, expected != "disk-full")


def test_the_task_of_srun_has_the_error_without_a_rank() -> None:
    found = found_in(*TRACE, "srun: error: gpu03: task 0: Exited with exit code 1")
    assert found is not None
    assert (found.rank, found.node, found.cascade) == (0, "gpu03", ())
    found = found_in(*TRACE, "srun: error: gpu03: tasks 0-3: Exited with exit code 1")
    assert found is not None
    assert (found.rank, found.node, found.cascade) == (None, "gpu03", ())
    two = [f"srun: error: gpu0{task}: task {task}: Exited with exit code 1" for task in (1, 2)]
    found = found_in(*TRACE, *two)
    assert found is not None
    assert (found.rank, found.node, found.cascade) == (None, None, ())


def test_the_line_of_the_site_comes_with_a_refusal() -> None:
    site = "sbatch: error: this queue is closed on Sundays"
    found = found_in(site, "sbatch: error: Batch job submission failed: Unspecified error")
    assert found is not None
    assert found.id == "slurm-refused"
    assert site in [line.text for line in found.evidence]
    found = found_in(site, "sbatch: error: something else")
    assert found is not None
    assert (found.id, found.evidence[0].text) == ("unknown", site)
