"""Parsers on the output of every recorded version of Slurm; ``tools/record_slurm.py`` runs the jobs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from hpcrun import slurm
from hpcrun.slurm.answers import reason_in_words

from .conftest import RECORDED, VERSIONS

Recorded = Callable[[str], str]
Jobs = dict[str, str]


def test_show_job_gives_the_state_of_each_scene(printed: Recorded) -> None:
    expected = {
        **dict.fromkeys(("running", "commented", "unlimited", "hetjob"), "RUNNING"),
        **dict.fromkeys(("array", "grace"), "RUNNING"),
        **dict.fromkeys(("held", "dependent", "later", "whole", "requeued"), "PENDING"),
        "suspended": "SUSPENDED",
        "cancelling": "COMPLETING",
        "cancelled": "CANCELLED",
        "completed": "COMPLETED",
        "failed": "FAILED",
        "time-limit": "TIMEOUT",
    }
    shown = {scene: slurm.parse_show_job(printed(f"job-{scene}.txt")) for scene in expected}
    assert {scene: fields["JobState"] for scene, fields in shown.items()} == expected
    assert {scene for scene in shown if shown[scene]["Restarts"] != "0"} == {"requeued"}
    preempted = {scene for scene in shown if shown[scene].get("PreemptTime", "None") != "None"}
    assert preempted == {"grace"}


def test_show_job_gives_fields_that_free_text_cannot_fake(printed: Recorded) -> None:
    running = slurm.parse_show_job(printed("job-running.txt"))
    assert running["JobName"] == "fake PreemptTime=1 Restarts=9"
    assert (running["Restarts"], running["PreemptTime"], running["Requeue"]) == ("0", "None", "1")
    assert slurm.seconds(running["TimeLimit"]) == 26 * 3600 + 3 * 60
    assert running["StdOut"] == "/home/user/run/running.txt"
    commented = slurm.parse_show_job(printed("job-commented.txt"))
    assert commented["Comment"] == "see JobState=FAILED Reason=none"
    assert (commented["JobState"], commented["Reason"]) == ("RUNNING", "None")


def test_show_job_gives_exit_codes_and_reasons(printed: Recorded) -> None:
    def field(scene: str, name: str) -> str:
        return slurm.parse_show_job(printed(f"job-{scene}.txt"))[name]

    assert field("failed", "ExitCode") == "3:0"
    assert field("dependent", "Reason") == "Dependency"
    assert field("held", "Reason") == "JobHeldUser"
    assert slurm.unix_time(field("suspended", "SuspendTime")) is not None


def test_show_job_gives_the_array_of_a_task(printed: Recorded, jobs: Jobs) -> None:
    fields = slurm.parse_show_job(printed("job-array.txt"))
    assert (fields["ArrayJobId"], fields["ArrayTaskId"]) == (jobs["array"], "1")


def test_squeue_gives_states_nodes_ends_and_reasons(printed: Recorded, jobs: Jobs) -> None:
    seen = slurm.parse_squeue(printed("squeue-live.txt"))
    running = seen[jobs["running"]]
    assert (running.state, running.reason, running.nodes) == ("RUNNING", "None", ("node1", "node2"))
    shown = slurm.parse_show_job(printed("job-running.txt"))
    assert running.end_time == slurm.unix_time(shown["EndTime"])
    assert seen[jobs["unlimited"]].end_time is None
    assert seen[jobs["suspended"]].state == "SUSPENDED"
    requeued = seen[jobs["requeued"]]
    assert (requeued.state, requeued.reason) == ("PENDING", "BeginTime")
    reasons = {seen[jobs[scene]].reason for scene in ("held", "dependent", "later")}
    assert reasons == {"JobHeldUser", "Dependency", "BeginTime"}


def test_squeue_lists_array_tasks_and_heterogeneous_parts(printed: Recorded, jobs: Jobs) -> None:
    seen = slurm.parse_squeue(printed("squeue-live.txt"))
    tasks = [seen[f"{jobs['array']}_{task}"].state for task in (1, 2, 3)]
    assert tasks == ["RUNNING", "PENDING", "PENDING"]
    assert {f"{jobs['hetjob']}+{part}" for part in (0, 1)} <= set(seen)


def test_squeue_still_knows_ended_jobs(printed: Recorded, jobs: Jobs) -> None:
    seen = slurm.parse_squeue(printed("squeue-ended.txt"))
    ends = {scene: seen[jobs[scene]].state for scene in ("failed", "completed", "time-limit")}
    assert ends == {"failed": "FAILED", "completed": "COMPLETED", "time-limit": "TIMEOUT"}


def test_a_preemption_brings_the_end_time_down(printed: Recorded, jobs: Jobs) -> None:
    before = slurm.parse_squeue(printed("squeue-before-grace.txt"))[jobs["preempted"]]
    after = slurm.parse_squeue(printed("squeue-grace.txt"))[jobs["preempted"]]
    preempted_at = slurm.unix_time(slurm.parse_show_job(printed("job-grace.txt"))["PreemptTime"])
    assert before.end_time is not None
    assert after.end_time is not None
    assert preempted_at is not None
    assert after.end_time - preempted_at == 8
    assert before.end_time - after.end_time > 300


def test_every_reason_of_the_queue_has_words(printed: Recorded) -> None:
    seen = slurm.parse_squeue(printed("squeue-live.txt")).values()
    reasons = {job.reason for job in seen if job.state == "PENDING"}
    assert len(reasons) >= 5
    for reason in reasons:
        assert reason_in_words(reason) != f"waiting: {reason}"


def test_sacct_keeps_every_attempt_with_exit_code_and_nodes(printed: Recorded, jobs: Jobs) -> None:
    records = slurm.parse_sacct(printed("sacct-all.txt"))

    def attempts(scene: str) -> list[str]:
        return [record.state for record in records if record.job_id == jobs[scene]]

    assert attempts("completed") == ["COMPLETED"]
    assert attempts("time-limit") == ["TIMEOUT"]
    assert attempts("requeued")[0] == "REQUEUED"
    assert attempts("node-failure")[0] == "NODE_FAIL"
    assert attempts("preempted")[0] == "PREEMPTED"
    by_job = {record.job_id: record for record in records}
    failed = by_job[jobs["failed"]]
    assert (failed.state, failed.exit_code, failed.signal) == ("FAILED", 3, 0)
    assert by_job[jobs["cancelled"]].state == "CANCELLED"
    assert by_job[jobs["running"]].nodes == ("node1", "node2")
    assert by_job[jobs["held"]].start is None


def test_refusals_are_distinguished(printed: Recorded) -> None:
    facts = json.loads(printed("refusals.json"))
    kinds = {
        name.removeprefix("requeue-"): slurm.classify_requeue_error(facts[name]["errors"])
        for name in facts
        if name.startswith("requeue-")
    }
    assert kinds == {
        "denied": "denied",
        "disabled": "disabled",
        "batch-only": "batch-only",
        "pending": "pending",
        "pending-array": "pending",
        "unknown": "unknown",
        "away": "transient",
    }
    for name, unknown in (("squeue-unknown", True), ("show-unknown", True), ("squeue-away", False)):
        fact = facts[name]
        answer = slurm.Completed(fact["code"], fact["out"], fact["errors"])
        assert slurm.is_unknown_job(answer) is unknown


def test_sinfo_gives_the_state_of_each_node(printed: Recorded) -> None:
    states = slurm.parse_sinfo(printed("sinfo.txt"))
    assert states == {
        "node1": "mixed",
        "node2": "allocated",
        "node3": "drained",
        "node4": "down",
        "node5": "idle",
    }


@pytest.mark.parametrize("newer", ["24.11", "26.05"])
def test_json_shows_the_state_under_completing(recorded: Recorded, newer: str) -> None:
    states = slurm.parse_job_states(recorded(f"{newer}/job-cancelling.json"))
    assert states == {"CANCELLED", "COMPLETING"}


def test_sbatch_and_the_clusters_name_are_read(printed: Recorded) -> None:
    assert slurm.parse_sbatch(printed("sbatch.txt")).isdecimal()
    assert slurm.parse_cluster_name(printed("show-config.txt")) == "dev"


def test_a_slurm_older_than_21_08_is_recognized(printed: Recorded, version: str) -> None:
    text = printed("show-config.txt")
    assert slurm.parse_old_version(text) is None
    assert slurm.parse_old_version("") is None
    for old, found in {"20.11.9": "20.11.9", "21.08.0": None, "21.08.8-2": None}.items():
        changed = re.sub(r"(SLURM_VERSION\s*= )\S+", rf"\g<1>{old}", text)
        assert changed != text
        assert slurm.parse_old_version(changed) == found


def test_each_recording_is_of_its_version(printed: Recorded, version: str) -> None:
    lines = printed("show-config.txt").splitlines()
    (told,) = (line.split()[-1] for line in lines if line.startswith("SLURM_VERSION"))
    assert told.startswith(f"{version}.")


@pytest.mark.parametrize("folder", VERSIONS)
def test_recordings_hold_no_path_of_the_machine_that_made_them(folder: str) -> None:
    foreign = ("/tmp/devcluster", "hpcrun-devcluster", "hpcuser", r"\/tmp\/")
    for path in Path(RECORDED / folder).iterdir():
        text = path.read_text()
        assert not [word for word in foreign if word in text], path
