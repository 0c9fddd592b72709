"""Faults that strike while a run restarts: from the death of a rank to the first step of the next attempt."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from hpcrun.run.journal.journal import Journal
from tests.on_slurm.cluster import FINAL_STATES
from tests.support import jobs

from .disturbed import Chaos

# Seconds from the death of a rank in which a start inside the allocation happens, and a requeue begins.
WINDOW = 9.0
# Seconds in which a cancelled job that was started again by mistake would open the run.
_COMES_BACK = 8.0

Pick = Callable[[list[str]], bool]


def words_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
    except OSError:
        return []


def is_srun(words: list[str]) -> bool:
    """Return True for the srun that starts the ranks."""
    return Path(words[0]).name == "srun" and "hpcrun.worker" in words


def is_shell(words: list[str]) -> bool:
    """Return True for the shell of the batch step that runs srun."""
    return words[:2] == ["bash", "-c"] and words[-1] == "hpcrun"


def is_batch_step(words: list[str]) -> bool:
    """Return True for `hpcrun batch`."""
    return words[1:4] == ["-m", "hpcrun", "batch"]


def is_step_daemon(words: list[str]) -> bool:
    """Return True for the slurmstepd of srun's newest step, and of none of the batch script."""
    return (
        words[0].startswith("slurmstepd:") and "extern" not in words[0] and "batch" not in words[0]
    )


def is_node_daemon(words: list[str]) -> bool:
    """Return True for slurmd."""
    return Path(words[0]).name == "slurmd"


def kill(chaos: Chaos, node: str, pick: Pick, number: signal.Signals = signal.SIGKILL) -> str:
    """Signal the chosen processes of ``node``; return how many there were."""
    found = [pid for pid in chaos.slurm.processes(node) if (words := words_of(pid)) and pick(words)]
    for pid in found:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
    return f"{len(found)} on {node}"


def killed(pick: Pick, *, anywhere: bool = False) -> Callable[[Chaos], str]:
    """Return a fault that kills processes of the batch host, or of any node of the job."""

    def strike(chaos: Chaos) -> str:
        node = chaos.dice.choice(chaos.nodes()) if anywhere else chaos.batch_host()
        return kill(chaos, node, pick)

    return strike


def kill_a_rank(chaos: Chaos) -> str:
    """Kill one rank that exists now."""
    node = chaos.dice.choice(chaos.nodes())
    found = [pid for pid in chaos.slurm.processes(node) if jobs.is_rank(pid)]
    if not found:
        return "no rank there yet"
    os.kill(chaos.dice.choice(found), signal.SIGKILL)
    return f"on {node}"


def restart_node_daemon(chaos: Chaos) -> str:
    """Restart slurmd of one node; its steps continue."""
    node = chaos.dice.choice(chaos.nodes())
    kill(chaos, node, is_node_daemon, signal.SIGTERM)
    late = time.monotonic() + chaos.dice.uniform(0.0, 3.0)
    while time.monotonic() < late or any(
        (words := words_of(pid)) and is_node_daemon(words) for pid in chaos.slurm.processes(node)
    ):
        time.sleep(0.05)
    chaos.slurm.revive_node(node)
    return f"on {node}"


def restart_controller(chaos: Chaos) -> str:
    """Stop slurmctld for some seconds."""
    seconds = chaos.dice.uniform(0.0, 6.0)
    chaos.slurm.stop_daemon("slurmctld")
    time.sleep(seconds)
    chaos.slurm.start_daemon("slurmctld")
    return f"for {seconds:.1f} s"


def drain_node(chaos: Chaos) -> str:
    """Drain a node of the job; an administrator returns it later."""
    node = chaos.dice.choice(chaos.nodes())
    chaos.slurm.admin("scontrol", "update", f"nodename={node}", "state=drain", "reason=test")
    return f"{node}"


def cancelled(*command: str) -> Callable[[Chaos], str]:
    """Return a fault that cancels the job, and resumes the run once the job has stayed away."""

    def strike(chaos: Chaos) -> str:
        job = chaos.job()
        if command[0] == "hpcrun":
            chaos.hpcrun(*command[1:], chaos.run.name)
        else:
            chaos.slurm.run([*command, job])
        chaos.slurm.wait_state(job, FINAL_STATES)
        before = _opened(chaos)
        time.sleep(_COMES_BACK)
        assert chaos.slurm.state(job) in FINAL_STATES, f"job {job} came back\n{chaos.story()}"
        assert _opened(chaos) == before, f"an attempt began after the end\n{chaos.story()}"
        # Slurm kills a batch step that waits for ranks too long, and the event log then has no end.
        row = json.loads(chaos.hpcrun("status", "--json", chaos.run.name))
        assert row["state"] == "cancelled", f"{command}: {row}\n{chaos.story()}"
        chaos.hpcrun("resume", chaos.run.name, "--detach")
        return f"now job {chaos.job()}"

    return strike


def _opened(chaos: Chaos) -> int:
    return sum(event.tag == "opened" for event in Journal(chaos.run).read().events)


STRIKES: dict[str, Callable[[Chaos], str]] = {
    "rank": kill_a_rank,
    "srun": killed(is_srun),
    "shell": killed(is_shell),
    "batch step": killed(is_batch_step),
    "slurmstepd": killed(is_step_daemon, anywhere=True),
    "slurmd": restart_node_daemon,
    "slurmctld": restart_controller,
    "drain": drain_node,
    "scancel": cancelled("scancel"),
    "cancel": cancelled("hpcrun", "cancel"),
    "cancel --now": cancelled("hpcrun", "cancel", "--now"),
}


def during_restart(second: str) -> Callable[[Chaos], str]:
    """Return a fault that kills a rank, and strikes once more at a random moment of the restart."""

    def strike(chaos: Chaos) -> str:
        ends = len(chaos.ends())
        moment = chaos.dice.uniform(0.0, WINDOW)
        where = kill_a_rank(chaos)
        begun = time.monotonic()
        while time.monotonic() < begun + moment:
            time.sleep(0.01)
        at = len(chaos.ends()) - ends, _opened(chaos)
        detail = STRIKES[second](chaos)
        chaos.wait_for_end(ends)
        return (
            f"rank {where}; after {moment:.1f} s ({at[0]} ended, {at[1]} opened) {second} {detail}"
        )

    return strike
