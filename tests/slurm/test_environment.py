"""A clean environment to submit from, and export lines that bash reads back unchanged."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st

from hpcrun.slurm.environment import (
    export_from_environment,
    sbatch_defaults,
    scrub,
)


def test_nothing_of_another_job_survives(
    recorded_env: Callable[[str], dict[str, str]],
) -> None:
    inherited = {**recorded_env("uneven-step"), **recorded_env("torchrun")}
    inherited |= {
        "SLURM_CPU_BIND": "quiet,mask_cpu:0x1",
        "SBATCH_NO_REQUEUE": "1",
        "SRUN_DEBUG": "3",
        "PMIX_RANK": "0",
        "PMI_RANK": "0",
        "OMPI_COMM_WORLD_RANK": "0",
        "HPCRUN_LOCAL_CLUSTER": "1",
        "HPCRUN_LOCAL_JOB": "/runs/a/logs/1",
    }
    assert set(scrub(inherited)) == {"CUDA_VISIBLE_DEVICES"}


def test_what_is_not_a_launchers_is_kept() -> None:
    kept = {
        "SLURM_CONF": "/etc/slurm/slurm.conf",
        "PATH": "/bin",
        "NCCL_SOCKET_IFNAME": "ib0",
        "OMPI_MCA_btl": "self,tcp",
        "RANKING": "1",
    }
    assert scrub(kept) == kept


def test_slurms_variables_for_mpirun_stay_in_that_job() -> None:
    # As Slurm 26.05 sets them in a batch script.
    told = {
        "HYDRA_BOOTSTRAP": "slurm",
        "HYDRA_LAUNCHER_EXTRA_ARGS": "--external-launcher",
        "I_MPI_HYDRA_BOOTSTRAP": "slurm",
        "I_MPI_HYDRA_BOOTSTRAP_EXEC_EXTRA_ARGS": "--external-launcher",
        "OMPI_MCA_plm_slurm_args": "--external-launcher",
        "PRTE_MCA_plm_slurm_args": "--external-launcher",
    }
    own = {"HYDRA_FULL_ERROR": "1", "PRTE_MCA_rmaps_default_mapping_policy": "core"}
    assert scrub({**told, **own, "SLURM_JOB_ID": "7"}) == own
    assert scrub(told) == told


def test_defaults_for_sbatch_are_known_in_an_enclosing_job() -> None:
    own = {"SBATCH_ACCOUNT": "astro", "SBATCH_QOS": "", "SBATCH_GRES": "fpga:1", "SLURM_CONF": "/x"}
    assert sbatch_defaults(own) == {"SBATCH_ACCOUNT": "account"}
    assert sbatch_defaults({"SBATCH_TIMELIMIT": "UNLIMITED"}) == {}
    assert sbatch_defaults({"SBATCH_TIMELIMIT": "30"}) == {"SBATCH_TIMELIMIT": "time"}
    inside = own | {"SLURM_JOB_ID": "7", "SBATCH_CPU_BIND_LIST": "0x1"}
    assert sbatch_defaults(inside) == {}


@settings(max_examples=30, deadline=None)
@given(st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20))
def test_bash_reads_any_value_back(value: str) -> None:
    lines, environ = export_from_environment({"HOSTILE": value})
    script = "\n".join([*lines, 'printf %s "$HOSTILE${HPCRUN_VALUE_OF_HOSTILE-}"'])
    environ["PATH"] = os.environ["PATH"]
    done = subprocess.run(["bash", "-c", script], env=environ, capture_output=True, check=True)
    assert done.stdout == value.encode()
