"""`hpcrun cancel` for one run of a job that several runs share, with substitutes for Slurm's programs."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun.errors import LaunchError
from hpcrun.job.history import asked_to_end
from hpcrun.run.directory import RunDirectory, create
from hpcrun.run.events import Attempt, read_events, record_event, was_cancelled
from hpcrun.slurm.launch import jobs, stopping

FIRST = Attempt("1_0", 0)
SQUEUE = """#!/bin/bash
case "$*" in
*--steps*) {steps} ;;
*) echo '1_0|RUNNING||N/A,N/A|1:00|None|s' ;;
esac
"""


def program(folder: Path, name: str, text: str) -> None:
    (folder / name).write_text(text)
    (folder / name).chmod(0o755)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run that shares job 1_0, and whose ranks are step 1_0.1."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    program(tmp_path, "squeue", SQUEUE.format(steps="echo '1_0.1|000'"))
    program(tmp_path, "scancel", f'#!/bin/bash\necho "$*" >> {tmp_path}/signals\n')
    for name in ("scontrol", "sacct"):
        program(tmp_path, name, "#!/bin/bash\nexit 1\n")
    made = create(tmp_path / "s" / "000", "job: {cpu: true}\n", {})
    record_event(made, "submitted", attempt=FIRST, executor="slurm", pack=2)
    record_event(made, "opened", attempt=FIRST, executor="slurm")
    return made


def cancelled(run: RunDirectory) -> bool:
    events = read_events(run)
    assert asked_to_end(events, FIRST) == was_cancelled(events, FIRST.job)
    return was_cancelled(events, FIRST.job)


def test_the_ranks_get_the_signal_and_the_run_ends(run: RunDirectory, tmp_path: Path) -> None:
    assert "the other runs of the job continue" in stopping.cancel(run)
    assert (tmp_path / "signals").read_text() == "--signal=TERM 1_0.1\n"
    assert cancelled(run)


@pytest.mark.parametrize("end", [stopping.cancel, stopping.kill])
def test_a_signal_that_slurm_refuses_cancels_nothing(
    run: RunDirectory, tmp_path: Path, end: Callable[[RunDirectory], str]
) -> None:
    program(tmp_path, "scancel", "#!/bin/bash\necho 'scancel: error: no controller' >&2; exit 1\n")
    with pytest.raises(LaunchError, match="no controller"):
        end(run)
    assert not cancelled(run)
    # The first of two cancellations counts, also where the second fails.
    program(tmp_path, "scancel", "#!/bin/bash\n")
    end(run)
    program(tmp_path, "scancel", "#!/bin/bash\nexit 1\n")
    with pytest.raises(LaunchError):
        end(run)
    assert cancelled(run)


def test_without_an_answer_it_is_unknown_whether_the_ranks_run(
    run: RunDirectory, tmp_path: Path
) -> None:
    program(tmp_path, "squeue", SQUEUE.format(steps="echo 'slurm_load: timed out' >&2; exit 1"))
    with pytest.raises(LaunchError, match="Slurm does not say whether its ranks run"):
        stopping.cancel(run)
    program(tmp_path, "squeue", "#!/bin/bash\necho 'slurm_load: timed out' >&2; exit 1\n")
    # So nothing starts the run again.
    assert jobs.state(run).live
    program(tmp_path, "squeue", SQUEUE.format(steps="true"))
    with pytest.raises(LaunchError, match="has no ranks in job 1_0 now"):
        stopping.cancel(run)
    assert not cancelled(run)
