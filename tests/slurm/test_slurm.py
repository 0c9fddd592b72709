"""Commands and parsers, on the output of Slurm 22.05 for jobs with every kind of end."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hpcrun import slurm
from hpcrun.errors import ClusterError

Recorded = Callable[[str], str]


def test_a_reason_with_bars_and_banners_around_do_no_harm() -> None:
    text = "Welcome to the cluster\n\n7|PENDING||N/A|5:00|Nodes down, or a|b|größe\n|||||\n"
    jobs = slurm.parse_squeue(text)
    assert set(jobs) == {"7"}
    assert (jobs["7"].reason, jobs["7"].name) == ("Nodes down, or a|b", "größe")


def test_a_state_cut_by_a_narrow_column_is_whole_again() -> None:
    (record,) = slurm.parse_sacct("7|CANCELLED+|0:0|Unknown|Unknown|None assigned\n")
    assert record.state == "CANCELLED"


def test_the_submitters_command_line_cannot_fake_a_field(recorded: Recorded) -> None:
    shown = slurm.parse_show_job(recorded("26.05/show-cancelling.txt"))
    assert shown["SubmitLine"].startswith("sbatch --parsable --output=c.out --wrap trap")
    assert (shown["JobState"], shown["StdErr"]) == ("COMPLETING", "")
    faked = "JobId=1 JobState=RUNNING\n   SubmitLine=sbatch --wrap x JobState=FAILED Restarts=9\n"
    assert "Restarts" not in slurm.parse_show_job(faked)


@pytest.mark.parametrize(
    ("printed", "kind"),
    [
        ("9_2-3: Job is pending execution\n", "pending"),
        ("Unexpected message received for job 18\n", "transient"),
        ("Unable to contact slurm controller (connect failure) for job 18\n", "transient"),
        ("Socket timed out on send/recv operation for job 18\n", "transient"),
        ("scontrol timed out after 10 s", "transient"),
        ("", "unknown"),
    ],
)
def test_errors_of_a_requeue_are_distinguished(printed: str, kind: str) -> None:
    assert slurm.classify_requeue_error(printed) == kind


@pytest.mark.parametrize(
    ("printed", "job"),
    [
        ("41\n", "41"),
        ("40;dev\n", "40"),
        ("Submitted batch job 41\n", "41"),
        ("Submitted batch job 1 on cluster dev\n", "1"),
        ("-- 3 % of your budget left --\n40;dev\n\n", "40"),
    ],
)
def test_the_job_id_of_sbatch_is_found(printed: str, job: str) -> None:
    assert slurm.parse_sbatch(printed) == job


def test_a_default_cluster_of_the_user_changes_no_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SLURM_CLUSTERS", "elsewhere")
    assert slurm.run(["printenv", "SLURM_CLUSTERS"]).stdout == ""


@pytest.mark.parametrize("printed", ["", "\n", "sbatch: error: no\n", "12 34"])
def test_an_answer_of_sbatch_without_a_job_id_is_refused(printed: str) -> None:
    with pytest.raises(ClusterError, match="squeue --me"):
        slurm.parse_sbatch(printed)


@pytest.mark.parametrize("job", ["", "-1", "abc", "7;rm", "7 8", "9_[1-3]", "--me", "7\n"])
def test_what_is_not_a_job_id_reaches_no_command(job: str) -> None:
    for build in (
        slurm.scancel_command,
        slurm.scontrol_requeue_command,
        slurm.scontrol_show_job_command,
        lambda one: slurm.squeue_command([one]),
        lambda one: slurm.sacct_command([one]),
    ):
        with pytest.raises(ClusterError, match="job id"):
            build(job)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("4:57", 297),
        ("1:00:00", 3600),
        ("364-23:59:57", (364 * 24 + 24) * 3600 - 3),
        ("0:00", 0),
        ("UNLIMITED", None),
        ("NOT_SET", None),
        ("", None),
    ],
)
def test_durations_are_seconds(text: str, expected: int | None) -> None:
    assert slurm.seconds(text) == expected


@given(st.integers(0, 10**7))
def test_any_duration_that_slurm_writes_is_read_back(total: int) -> None:
    minutes, left = divmod(total, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    assert slurm.seconds(f"{days}-{hours:02}:{minutes:02}:{left:02}") == total


def test_times_are_unix_seconds_or_this_machines_iso() -> None:
    now = float(int(time.time()))
    assert slurm.unix_time(f"{now:.0f}") == now
    assert slurm.unix_time(time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(now))) == now
    for none in ("N/A", "NONE", "Unknown", "None", "", "2026-13-01T00:00:00"):
        assert slurm.unix_time(none) is None


def test_a_program_runs_and_its_end_is_returned() -> None:
    done = slurm.run(["sh", "-c", "echo out; echo err >&2; exit 3"])
    assert done == slurm.Completed(3, "out\n", "err\n")


def test_a_missing_program_and_a_slow_one_are_return_codes(tmp_path: Path) -> None:
    missing = slurm.run([str(tmp_path / "absent")])
    assert (missing.returncode, missing.stdout) == (slurm.NOT_FOUND, "")
    slow = slurm.run(["sleep", "5"], timeout=0.1)
    assert slow.returncode == slurm.TIMED_OUT
    assert slurm.classify_requeue_error(slow.stderr) == "transient"


def test_a_users_defaults_for_squeue_do_not_bend_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SQUEUE_STATES", "COMPLETED")
    monkeypatch.setenv("SLURM_TIME_FORMAT", "relative")
    seen = dict(line.split("=", 1) for line in slurm.run(["env"]).stdout.splitlines())
    assert "SQUEUE_STATES" not in seen
    assert (seen["SLURM_TIME_FORMAT"], seen["LC_ALL"]) == ("%s", "C")
    # Without these, the nodes and steps of a hidden partition are missing in the answers.
    assert {seen[f"{one}_ALL"] for one in ("SINFO", "SQUEUE", "SCONTROL")} == {"1"}


def test_an_environment_for_sbatch_is_handed_over_exactly() -> None:
    assert slurm.run(["/usr/bin/env"], environ={"A": "1"}).stdout == "A=1\n"


def put_on_path(place: Path, **programs: str) -> str:
    for name, body in programs.items():
        script = place / name
        script.write_text(f"#!/bin/sh\n{body}\n")
        script.chmod(0o755)
    return str(place)


@pytest.mark.parametrize(
    "ping",
    [
        "echo 'Slurmctld(primary) at ctl is UP'",
        "echo 'Slurmctld(primary) at ctl is DOWN'; exit 1",
        "echo 'scontrol: fatal: Unable to process configuration file' >&2; exit 1",
        "exec /bin/sleep 30",
    ],
)
def test_a_named_cluster_counts_while_its_controller_is_away(
    ping: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", put_on_path(tmp_path, sbatch="exit 1", scontrol=ping))
    assert slurm.configured(timeout=0.5)


def test_without_sbatch_there_is_no_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", put_on_path(tmp_path, scontrol="echo UP"))
    assert not slurm.configured()


@pytest.mark.slurm
@pytest.mark.skipif(shutil.which("scontrol") is None, reason="scontrol is not installed")
def test_the_real_programs_without_a_configuration_know_no_cluster(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SLURM_CONF", raising=False)
    if Path("/etc/slurm/slurm.conf").exists():
        pytest.skip("this machine belongs to a cluster")
    assert not slurm.configured(timeout=30.0)


def test_the_record_of_one_array_task_is_found() -> None:
    text = (
        "JobId=120 ArrayJobId=120 ArrayTaskId=2-3 JobName=s\n   JobState=PENDING Restarts=0\n\n"
        "JobId=12 ArrayJobId=120 ArrayTaskId=0 JobName=s\n   JobState=RUNNING Restarts=4\n\n"
        "JobId=121 ArrayJobId=120 ArrayTaskId=1 JobName=s\n   JobState=COMPLETED Restarts=1\n"
    )
    found = [slurm.parse_show_job(text, job)["Restarts"] for job in ("120", "12", "121")]
    assert found == ["0", "4", "1"]
    assert slurm.parse_show_job(text, "99") == slurm.parse_show_job(text)
