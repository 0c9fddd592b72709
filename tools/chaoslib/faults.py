"""The faults, their order, and the causes that the event log must have afterwards."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from tests.support import jobs

from .disturbed import LIMIT_MINUTES, STEPS_PER_FAULT, Chaos
from .restarting import STRIKES, during_restart

# Seconds; without a controller, Slurm notices no node failure.
MOST_WITHOUT_CONTROLLER = 60.0


@dataclass(frozen=True)
class Met:
    """An injected fault: the last logged step before it, and the seconds until a later step."""

    fault: str
    step: int
    detail: str
    recovery: float


def preempt(chaos: Chaos) -> str:
    """Let a job of the urgent partition take all nodes for a short time."""
    ends = len(chaos.ends())
    nodes = len(chaos.slurm.nodes)
    chaos.slurm.sbatch(
        *("-p", "urgent", f"-N{nodes}", "--exclusive", "--output=/dev/null"), "--wrap", "sleep 0.5"
    )
    chaos.wait_for_end(ends)
    return "by a job of partition urgent"


def kill_rank(chaos: Chaos) -> str:
    """Kill one rank with SIGKILL."""
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
    """Simulate power loss of one node of the job."""
    ends = len(chaos.ends())
    node = chaos.dice.choice(chaos.nodes())
    chaos.slurm.kill_node(node)
    try:
        chaos.wait_for_end(ends)
    finally:
        chaos.slurm.revive_node(node)
    return node


def cut_link(chaos: Chaos) -> str:
    """Cut the link of one node of the job; its processes survive."""
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
    """Cancel the job with scancel, then resume the run."""
    chaos.hpcrun("cancel", chaos.run.name)
    chaos.hpcrun("resume", chaos.run.name, "--detach")
    return f"now job {chaos.job()}"


def stop_controller(chaos: Chaos) -> str:
    """Stop slurmctld for some seconds; running jobs must continue."""
    at, ends, seconds = chaos.step(), len(chaos.ends()), chaos.dice.randint(2, 10)
    chaos.allow(at + 6)
    chaos.slurm.stop_daemon("slurmctld")
    until = time.monotonic() + seconds

    def enough() -> bool:
        gone_on, late = chaos.step() >= at + 5, time.monotonic() > until + MOST_WITHOUT_CONTROLLER
        # An attempt that ends now needs the controller to be classified and requeued.
        return time.monotonic() > until and (gone_on or late or len(chaos.ends()) > ends)

    try:
        chaos.wait(enough, "the run made no progress without slurmctld")
    finally:
        chaos.slurm.start_daemon("slurmctld")
    went_on = chaos.step() >= at + 5
    chaos.wait(
        lambda: went_on or len(chaos.ends()) > ends, "the run made no progress without slurmctld"
    )
    return f"for {seconds} s and more"


def time_limit(chaos: Chaos) -> str:
    """Shorten the job's time limit so that it is near."""
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
    """A fault, and the causes that the event log may have for its end (none: the attempt does not end).

    ``during``: it strikes during a restart, with any causes.
    """

    strike: Callable[[Chaos], str]
    causes: tuple[str, ...]
    during: bool = False


FAULTS: dict[str, Fault] = {
    "preempt": Fault(preempt, ("preemption",)),
    "kill a rank": Fault(kill_rank, ("crash",)),
    "kill a node": Fault(kill_node, ("node-failure",)),
    # Slurm (node ping) or the watchdog of the ranks (hang) may notice the cut link first.
    "cut a link": Fault(cut_link, ("node-failure", "hang")),
    "scancel, resume": Fault(cancel_and_resume, ("cancelled",)),
    "stop slurmctld": Fault(stop_controller, ()),
    "time limit": Fault(time_limit, ("time-limit",)),
}


_DOUBLE = "a rank, then "
FAULTS |= {f"{_DOUBLE}{kind}": Fault(during_restart(kind), (), during=True) for kind in STRIKES}

# Slurm ends remains of an earlier attempt by the step's id, which may hit the new attempt too.
_STRIKES = 3
UNPLANNED = {"node-failure", "crash", "hang"}


@dataclass(frozen=True)
class Planned:
    """A planned fault, and the step from which it may be injected."""

    fault: str
    step: int


def plan(
    faults: int, dice: random.Random, during: bool = False, only: str | None = None
) -> list[Planned]:
    """Return the faults in random order with their steps; every kind occurs before a kind repeats.

    Args:
        during: only faults that strike during a restart.
        only: one of these.
    """
    kinds = [name for name, fault in FAULTS.items() if fault.during == during]
    kinds = [name for name in kinds if only is None or name.endswith(only)]
    order: list[str] = []
    while len(order) < faults:
        order += dice.sample(kinds, len(kinds))
    return [
        Planned(name, STEPS_PER_FAULT * number + dice.randint(1, STEPS_PER_FAULT // 2))
        for number, name in enumerate(order[:faults])
    ]


def disturb(chaos: Chaos, plan: list[Planned]) -> list[Met]:
    """Inject the faults of the plan, and print a line for each."""
    met: list[Met] = []
    for number, planned in enumerate(plan, start=1):
        chaos.allow(STEPS_PER_FAULT * number)
        last = _meet(chaos, planned)
        print(
            f"fault {number:>3}: {last.fault:<26} at step {last.step:>5}, next step after "
            f"{last.recovery:5.1f} s  ({last.detail})",
            flush=True,
        )
        met.append(last)
    return met


def _meet(chaos: Chaos, planned: Planned) -> Met:
    """Inject a fault; inject it again if another end came first."""
    begun, unplanned = time.monotonic(), list[str]()
    for _ in range(_STRIKES):
        met, early = _strike(chaos, planned)
        if early is None:
            break
        unplanned.append(f"after an unplanned {early}")
    assert early is None, f"{planned.fault}: never injected, {unplanned}\n{chaos.story()}"
    return replace(
        met, detail="; ".join([met.detail, *unplanned]), recovery=time.monotonic() - begun
    )


def _strike(chaos: Chaos, planned: Planned) -> tuple[Met, str | None]:
    """Return the injected fault, and the cause of another end that came before it, if any."""
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
    # Beyond the last step: recomputed steps are not progress.
    had = chaos.step()
    chaos.allow(had + 2)
    chaos.wait(chaos.starts_again, "the run did not start again")
    chaos.wait(lambda: chaos.step() > had, "the run made no progress")
    chaos.check_saved()
    causes = chaos.ends()[ends:]
    if fault.during:
        return Met(
            planned.fault, at, f"{detail}: {', '.join(causes)}", time.monotonic() - begun
        ), None
    if fault.causes and causes[:1] and causes[0] in UNPLANNED - set(fault.causes):
        return Met(planned.fault, at, detail, 0.0), causes[0]
    meant, more = (causes[:1], causes[1:]) if fault.causes else ([], causes)
    # On a busy machine Slurm may set a healthy node to down: an additional fault.
    as_meant = len(meant) == bool(fault.causes) and set(meant) <= set(fault.causes)
    assert as_meant and set(more) <= UNPLANNED, (  # noqa: PT018  (one message for both)
        f"{planned.fault}: the log says {causes}\n{chaos.story()}"
    )
    told = [detail, *(f"then an unplanned {cause}" for cause in more)]
    return Met(planned.fault, at, "; ".join(told), time.monotonic() - begun), None


def table(met: list[Met]) -> str:
    """Return the number of each fault, and the time from fault to new progress."""
    lines = [f"  {'fault':<26} {'times':>5} {'mean':>8} {'longest':>8}"]
    for name in FAULTS:
        took = [one.recovery for one in met if one.fault == name]
        if took:
            mean, longest = sum(took) / len(took), max(took)
            lines.append(f"  {name:<26} {len(took):>5} {mean:>6.1f} s {longest:>6.1f} s")
    return "\n".join(lines)
