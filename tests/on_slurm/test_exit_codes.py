"""Exit codes of a run that can neither save nor be requeued."""

from __future__ import annotations

import shutil

import pytest

from tests.support import jobs

pytestmark = [pytest.mark.slurm, pytest.mark.lifecycle]


def test_a_failed_last_save_gives_code_74(bench, calm):
    run = bench.submit("full", model__pause=0.05, checkpoint__every=5)
    with bench.held_at(run, 12):
        job = bench.job(run)
        # Like a full disk: no new file can be made next to the checkpoints.
        run.checkpoints.chmod(0o500)
        bench.hpcrun("preempt", "full")
    try:
        assert bench.wait_for_end(run) == "FAILED", bench.story(run)
    finally:
        run.checkpoints.chmod(0o700)
    assert bench.slurm.scontrol_show_job(job)["ExitCode"] == "74:0"
    assert (bench.slurm.restarts(job), bench.causes(run)) == (0, ["save-failed"])
    result = bench.result(run)
    assert (result["state"], result["cause"]) == ("failed", "save-failed")
    assert "Permission denied" in result["reason"]
    (stopped,) = jobs.events(run, "stopped")
    assert not stopped.committed
    bench.hpcrun("resume", "full")
    assert bench.wait_for_end(run) == "COMPLETED", bench.story(run)
    saved = [event.step for event in jobs.events(run, "saved")]
    assert jobs.events(run, "started")[1].step in saved
    assert jobs.final_state(run) == jobs.final_state(calm)


def test_a_folder_missing_on_one_node_costs_a_restart(bench):
    """The rank on that node ends before its attempt has started; other nodes may have the folder."""
    folder = bench.folder / "of-some" / "place"
    bench.slurm.run(["mkdir", "-p", str(folder)])
    shutil.copy(bench.folder / "probe.py", folder)
    hidden = str(folder.parent)
    bench.slurm.run(["mount", "-t", "tmpfs", "none", hidden], host="node2", user="root")
    try:
        words = bench.arguments("lacks", "--runs-dir", str(bench.folder / "runs"))
        words[words.index("empty.yaml")] = str(bench.folder / "empty.yaml")
        words.append("restarts.crash=1")
        bench.slurm.run(bench.command(*words), cwd=folder, env=bench.environ())
        run = bench.run("lacks")
        assert bench.wait_for_end(run) == "FAILED", bench.story(run)
    finally:
        bench.slurm.run(["umount", hidden], host="node2", user="root")
    assert bench.causes(run) == ["crash"] * 2
    reason = jobs.events(run, "ended")[0].reason
    assert "rank 1 on node2" in reason
    assert "cannot be entered: No such file or directory" in reason
