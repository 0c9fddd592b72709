"""The batch step of a job with a range of nodes."""

from pathlib import Path

import pytest

from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.slurm.avoided_nodes import add_failure
from tests.job.step_substitutes import FIRST, SHOWN, Desk
from tests.support.journal import read_events, record_event


@pytest.mark.parametrize(("nodes", "excluded"), [("2-3", ["n2"]), (3, [])])
def test_a_range_excludes_a_bad_node_and_starts_on_fewer(
    tmp_path: Path, nodes: int | str, excluded: list[str]
) -> None:
    desk = Desk(tmp_path, nodes=nodes, gpus=2)
    text = desk.run.config.read_text()
    desk.run.config.write_text(text.replace("in_place: true", "in_place: false"))
    pending = SHOWN.replace("RUNNING", "PENDING") + "   NumNodes=3 Partition=batch\\n"
    desk.answer(
        "scontrol",
        f"""case "$*" in
        requeue*) touch {tmp_path}/requeued ;;
        show*) if [ -e {tmp_path}/requeued ]; then printf '{pending}'; else printf '{SHOWN}'; fi ;;
        esac""",
    )
    desk.answer("sinfo", "printf 'batch*|n%s|idle|8|100|gpu:2\\n' 1 2 3")
    record_event(desk.run, "submitted", attempt=FIRST, executor="slurm", nodes=nodes, gpus=2)
    open_attempt(desk.run, FIRST, Budgets(), nodes=3)
    add_failure(tmp_path / "hpcrun" / "nodes.jsonl", "n2", "killed by SIGBUS", "another run")
    desk.answer("srun", "echo 'srun: error: n2: task 1: Killed'; exit 137")
    desk.step(XDG_STATE_HOME=str(tmp_path), SLURM_JOB_NUM_NODES="3")
    found = [event for event in read_events(desk.run) if event.tag == "excluded"]
    assert [host for event in found for host in event.hosts] == excluded, desk.told()
    (ranks,) = desk.called("srun")
    assert ("--ntasks-per-node=2" in ranks) is (nodes == "2-3")
