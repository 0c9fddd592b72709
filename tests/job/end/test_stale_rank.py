"""The exit code of a stale rank after a newer attempt has taken the run over."""

from pathlib import Path

import pytest

from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import create
from hpcrun.worker import harmless_code

ON_SLURM = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "1"}


@pytest.mark.parametrize("code", [1, 75, 137])
def test_a_stale_rank_exits_with_0(tmp_path: Path, code: int) -> None:
    run = create(tmp_path / "a", "x", {})
    open_attempt(run, Attempt("7", 0), Budgets())
    assert harmless_code(run, ON_SLURM, code) == code
    open_attempt(run, Attempt("7", 1), Budgets())
    assert harmless_code(run, ON_SLURM, code) == 0
    assert harmless_code(run, ON_SLURM | {"SLURM_RESTART_COUNT": "1"}, code) == code
    assert harmless_code(run, {}, code) == code
