"""What strikes a run, in which order, and what the event log has to say about it afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests import jobs

from .disturbed import LIMIT_MINUTES, STEPS_PER_FAULT, Chaos

# Seconds; a node that is lost meanwhile, nobody can tell.
MOST_WITHOUT_CONTROLLER = 60.0


@dataclass(frozen=True)
class Met:
    """A fault that was met: the last step logged before it, and the seconds until the run had moved on."""

    fault: str
    step: int
    detail: str
    recovery: float


def preempt(chaos: Chaos) -> str:
    """Let a job of the urgent partition take all nodes for a moment."""
    ends = len(chaos.ends())
    nodes = len(chaos.slurm.nodes)
    chaos.slurm.sbatch(
        *("-p", "urgent", f"-N{nodes}", "--exclusive", "--output=/dev/null"), "--wrap", "sleep 0.5"
    )
    chaos.wait_for_end(ends)
    return "by a job of partition urgent"


def kill_rank(chaos: Chaos) -> str:
    """SIGKILL one rank."""
    ends = len(chaos.ends())
    node = chaos.dice.choice(chaos.nodes())
    victims: list[int] = []

    def found() -> bool:
        victims[:] = sorted(pid for pid in chaos.slurm.processes(node) if jobs.is_rank(pid))
        return bool(victims)

    chaos.wait(found, f"no rank on {node}")
    os.kill(chaos.dice.choice(victims), signal.SIGKILL)
    chaos.wait_for_end(ends)
    return f"on {node}"


def kill_node(chaos: Chaos) -> str:
    """Take the power from one node of the job."""
    ends = len(chaos.ends())
    node = chaos.dice.choice(chaos.nodes())
    chaos.slurm.kill_node(node)
    try:
        chaos.wait_for_end(ends)
    finally:
        chaos.slurm.revive_node(node)
    return node


def cut_link(chaos: Chaos) -> str:
    """Pull the cable of one node of the job; its processes live on."""
    ends = len(chaos.ends())
    node = chaos.dice.choice(chaos.nodes())
    chaos.slurm.cut_link(node)
    try:
        chaos.wait_for_end(ends)
    finally:
        chaos.slurm.restore_link(node)
        chaos.slurm.revive_node(node)
    return node


def cancel_and_resume(chaos: Chaos) -> str:
    """scancel by the user, who changes his mind."""
    chaos.hpcrun("cancel", "disturbed")
    chaos.hpcrun("resume", "disturbed", "--detach")
    return f"now job {chaos.job()}"


def stop_controller(chaos: Chaos) -> str:
    """slurmctld goes away for some seconds; running jobs must not notice."""
    at, ends, seconds = chaos.step(), len(chaos.ends()), chaos.dice.randint(2, 10)
    chaos.slurm.stop_daemon("slurmctld")
    until = time.monotonic() + seconds

    def enough() -> bool:
        gone_on, late = chaos.step() >= at + 5, time.monotonic() > until + MOST_WITHOUT_CONTROLLER
        # An attempt that just then ends by itself can only be judged, and started again, with it.
        return time.monotonic() > until and (gone_on or late or len(chaos.ends()) > ends)

    try:
        chaos.wait(enough, "the run did not go on without slurmctld")
    finally:
        chaos.slurm.start_daemon("slurmctld")
    went_on = chaos.step() >= at + 5
    chaos.wait(
        lambda: went_on or len(chaos.ends()) > ends, "the run did not go on without slurmctld"
    )
    return f"for {seconds} s and more"


def time_limit(chaos: Chaos) -> str:
    """Shorten the job's limit so that it is near."""
    ends, job = len(chaos.ends()), chaos.job()
    shown = chaos.slurm.scontrol_show_job(job)
    hours, minutes, seconds = map(int, shown["RunTime"].rpartition("-")[2].split(":"))
    limit = (hours * 3600 + minutes * 60 + seconds) // 60 + 2
    chaos.slurm.admin("scontrol", "update", f"jobid={job}", f"TimeLimit={limit}")
    chaos.wait_for_end(ends)
    chaos.slurm.admin("scontrol", "update", f"jobid={job}", f"TimeLimit={LIMIT_MINUTES}")
    return f"{limit} min"


@dataclass(frozen=True)
class Fault:
    """What strikes, and the causes that the event log may give for the end (none: there is no end)."""

    strike: Callable[[Chaos], str]
    causes: tuple[str, ...]


FAULTS: dict[str, Fault] = {
    "preempt": Fault(preempt, ("preemption",)),
    "kill a rank": Fault(kill_rank, ("crash",)),
    "kill a node": Fault(kill_node, ("node-failure",)),
    # Whoever notices first: Slurm, which pings the node, or the ranks, whose step does not end.
    "cut a link": Fault(cut_link, ("node-failure", "hang")),
    "scancel, resume": Fault(cancel_and_resume, ("cancelled",)),
    "stop slurmctld": Fault(stop_controller, ()),
    "time limit": Fault(time_limit, ("time-limit",)),
}


# Slurm ends what it takes for the rest of an earlier start by the step's name, and so a new start too.
_STRIKES = 3
BY_ITSELF = {"node-failure", "crash", "hang"}


@dataclass(frozen=True)
class Planned:
    """A fault to come, and the step from which it may strike."""

    fault: str
    step: int


def plan(faults: int, dice: random.Random) -> list[Planned]:
    """Which faults, in which order, when: every kind comes up before one comes up again."""
    order: list[str] = []
    while len(order) < faults:
        order += dice.sample(list(FAULTS), len(FAULTS))
    return [
        Planned(name, STEPS_PER_FAULT * number + dice.randint(1, STEPS_PER_FAULT // 2))
        for number, name in enumerate(order[:faults])
    ]


def disturb(chaos: Chaos, plan: list[Planned]) -> list[Met]:
    """Meet the run with the faults of the plan, and say each on a line."""
    met: list[Met] = []
    for number, planned in enumerate(plan, start=1):
        chaos.allow(number)
        last = _meet(chaos, planned)
        print(
            f"fault {number:>3}: {last.fault:<16} at step {last.step:>5}, moved on after "
            f"{last.recovery:5.1f} s  ({last.detail})",
            flush=True,
        )
        met.append(last)
    return met


def _meet(chaos: Chaos, planned: Planned) -> Met:
    """Strike, and strike again where another end came first by itself."""
    begun, by_itself = time.monotonic(), list[str]()
    for _ in range(_STRIKES):
        met, early = _strike(chaos, planned)
        if early is None:
            break
        by_itself.append(f"after a {early} by itself")
    assert early is None, f"{planned.fault}: never met, {by_itself}\n{chaos.story()}"
    return replace(
        met, detail="; ".join([met.detail, *by_itself]), recovery=time.monotonic() - begun
    )


def _strike(chaos: Chaos, planned: Planned) -> tuple[Met, str | None]:
    """Return what was met, and the cause of an end that came before the fault, if one did."""
    chaos.wait(
        lambda: (
            chaos.step() >= planned.step
            and chaos.starts_again()
            and chaos.has_all_nodes()
            and chaos.is_running()
        ),
        f"step {planned.step} was not reached with all nodes",
    )
    fault = FAULTS[planned.fault]
    at, begun, ends = chaos.step(), time.monotonic(), len(chaos.ends())
    detail = fault.strike(chaos)
    # Beyond what it had: steps that are computed again are not yet progress.
    had = chaos.step()
    chaos.wait(chaos.starts_again, "the run did not start again")
    chaos.wait(lambda: chaos.step() > had, "the run did not get further")
    causes = chaos.ends()[ends:]
    if fault.causes and causes[:1] and causes[0] in BY_ITSELF - set(fault.causes):
        return Met(planned.fault, at, detail, 0.0), causes[0]
    meant, more = (causes[:1], causes[1:]) if fault.causes else ([], causes)
    # On a busy machine Slurm loses patience with a node that has nothing: then a fault comes by itself.
    as_meant = len(meant) == bool(fault.causes) and set(meant) <= set(fault.causes)
    assert as_meant and set(more) <= BY_ITSELF, (  # noqa: PT018  (one message for both)
        f"{planned.fault}: the log says {causes}\n{chaos.story()}"
    )
    told = [detail, *(f"then a {cause} by itself" for cause in more)]
    return Met(planned.fault, at, "; ".join(told), time.monotonic() - begun), None


def table(met: list[Met]) -> str:
    """How often each fault was met, and how long the run took to be further than before."""
    lines = [f"  {'fault':<16} {'times':>5} {'mean':>8} {'longest':>8}"]
    for name in FAULTS:
        took = [one.recovery for one in met if one.fault == name]
        if took:
            mean, longest = sum(took) / len(took), max(took)
            lines.append(f"  {name:<16} {len(took):>5} {mean:>6.1f} s {longest:>6.1f} s")
    return "\n".join(lines)
