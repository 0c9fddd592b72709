"""`hpcrun nccl tune` on this machine: a report, and one line for bad input."""

import json
import os
from pathlib import Path

import pytest
import yaml

from tests import jobs
from tests.cli.test_bad_input import require_one_line

QUICK = ("--local", "2", "--backend", "gloo", "--collectives", "all_reduce", "--sizes", "8:1K:128")


def test_a_report_of_this_machine(tmp_path: Path) -> None:
    # No interface remains to try: the default stays, whatever load the machine has.
    done = jobs.hpcrun(
        *(
            "nccl",
            "tune",
            *QUICK,
            "--seconds",
            "0.01",
            "--deterministic",
            "--json",
            "--out",
            "job.yaml",
        ),
        cwd=tmp_path,
        env={"GLOO_SOCKET_IFNAME": _only_interface()},
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["env"], report["ranks"], report["backend"]) == ({}, 2, "gloo")
    assert [cell["size"] for cell in report["default"][0]["cells"]] == [8, 1024]
    assert yaml.safe_load((tmp_path / "job.yaml").read_text()) == {"job": {"env": {}}}


def _only_interface() -> str:
    from hpcrun.ranks.interfaces import own_interfaces

    names = list(own_interfaces())
    if len(names) != 1:
        pytest.skip(f"this machine has {len(names)} interfaces")
    return names[0]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "--local 2"),
        (["--local", "1"], "2 to 64"),
        (["--local", "2", "--sizes", "8:x"], "--sizes 8:x"),
        (["--local", "2", "--collectives", "gather"], "--collectives gather"),
        (["--local", "2", "--effect", "0"], "--effect 0"),
        (["--local", "2", "--seconds", "0"], "--seconds 0"),
        (["--local", "2", "--tasks-per-node", "0"], "--tasks-per-node 0"),
        (["--local", "2", "--out", "none/job.yaml"], "--out none/job.yaml"),
        (["--local", "2", "train.sh"], "train.sh"),
    ],
)
def test_bad_input_is_one_line(tmp_path: Path, words: list[str], expected: str) -> None:
    env = {name: "" for name in ("SLURM_JOB_ID",) if name in os.environ}
    require_one_line(jobs.hpcrun("nccl", "tune", *words, cwd=tmp_path, env=env), expected)
