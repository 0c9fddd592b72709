"""Options of sbatch and srun that would replace a line on which hpcrun relies, with the remedy for each.

The lists come from the manual pages sbatch(1) and srun(1) of Slurm 22.05 to 26.05. An option that is not here
does not change the number of ranks, their limits, their signals, their logs or the restarts.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from hpcrun.config.slurm_options import GivenOption, Program, parse_options

BOTH: tuple[Program, ...] = ("sbatch", "srun")
SBATCH: tuple[Program, ...] = ("sbatch",)
SRUN: tuple[Program, ...] = ("srun",)

# srun(1), INPUT ENVIRONMENT VARIABLES: those without an option in hpcrun's own srun.
_VARIABLES = {
    **dict.fromkeys(("SLURM_NTASKS", "SLURM_NPROCS"), "ntasks"),
    **dict.fromkeys(("SLURM_NNODES", "SLURM_JOB_NUM_NODES"), "nodes"),
    **{"SLURM_NTASKS_PER_NODE": "ntasks-per-node", "SLURM_NTASKS_PER_GPU": "ntasks-per-gpu"},
    **{"SLURM_TIMELIMIT": "time", "SLURM_WAIT": "wait", "SLURM_STDERRMODE": "error"},
    **{"SLURM_JOB_ID": "jobid", "SLURM_BCAST": "bcast"},
}
Remedy = str | Callable[[str], str]


@dataclass(frozen=True)
class OptionRule:
    """Options that hpcrun sets itself, or relies on.

    Attributes:
        names: the long names.
        programs: the programs with this option.
        reason: what hpcrun does with it.
        remedy: what to write instead; a function gets the given value.
        fits: returns True for a value that changes nothing.
        refused: False if a run can do with the option, at a price.
    """

    names: Sequence[str]
    programs: Sequence[Program]
    reason: str
    remedy: Remedy
    fits: Callable[[str | None], bool] = lambda _: False
    refused: bool = True


@dataclass(frozen=True)
class Objection:
    """An option of the user that a rule is about; ``text`` has reason and remedy."""

    option: GivenOption
    text: str
    refused: bool


def objections(program: Program, items: Sequence[str]) -> list[Objection]:
    """Return the objections to options for ``program``, in their order; ``items``: one list of the config."""
    found = []
    for option in parse_options(program, items):
        rule = _rule_of(program, option.name)
        if rule is not None and not rule.fits(option.value):
            remedy = (
                rule.remedy if isinstance(rule.remedy, str) else rule.remedy(option.value or "")
            )
            found.append(Objection(option, f"{rule.reason}; {remedy}", rule.refused))
    return found


def objection_to_variable(name: str, value: str) -> str | None:
    """Return the objection to a variable of ``job.env`` that srun reads as an option, without the value."""
    option = _VARIABLES.get(name)
    rule = None if option is None else _rule_of("srun", option)
    if rule is None or rule.fits(value):
        return None
    remedy = rule.remedy if isinstance(rule.remedy, str) else rule.remedy("")
    return f"srun reads it as --{option}: {rule.reason}; {remedy}"


def _rule_of(program: Program, name: str) -> OptionRule | None:
    rules = [rule for rule in RULES if program in rule.programs]
    exact = next((rule for rule in rules if name in rule.names), None)
    if exact is not None or len(name) < 2:
        return exact
    # Several options begin so; another version of Slurm may know only this one of them.
    return next((rule for rule in rules for one in rule.names if one.startswith(name)), None)


def _signal_remedy(value: str) -> str:
    found = re.fullmatch(r"(?:[RBrb]+:)?(?:SIG)?(\w+)(?:@(\d+))?", value, re.IGNORECASE)
    if found is None:
        return "use job.warn_signal and job.signal_lead"
    name = {"10": "USR1", "12": "USR2", "15": "TERM"}.get(found[1], found[1].upper())
    warned = f"job.warn_signal={name}" if name in ("USR1", "USR2", "TERM") else "job.warn_signal"
    lead = f"job.signal_lead={found[2]}" if found[2] else "job.signal_lead"
    return f"use {warned} and {lead}"


def _flag(name: str) -> Callable[[str], str]:
    return lambda value: f"use --{name} {value}".rstrip()


_RANKS = (
    "use --nodes and --gpus for the number of ranks, --cpu --gpus N for ranks without GPUs, or for a command "
    "job.tasks_per_node (--launcher none: one task per node)"
)


def _keeps_all(value: str | None) -> bool:
    return value is not None and value.split(",")[0].upper() == "ALL"


def _is_zero(value: str | None) -> bool:
    return value is not None and value.strip() == "0"


def _export_remedy(value: str) -> str:
    given = [one for one in value.split(",") if "=" in one]
    example = f"job.env.{given[0]}" if given else "job.env.NAME=VALUE"
    return f"remove the option; {example} sets a variable of the ranks"


_NO_OUTPUT = "hpcrun reads the output of the ranks in the run's own logs"
_PRINTS = "the program would print a text, and start nothing"

RULES: Sequence[OptionRule] = (
    OptionRule(
        ["signal"],
        BOTH,
        "hpcrun's own signal before the time limit starts the last save and the requeue",
        _signal_remedy,
    ),
    OptionRule(
        ["time"],
        SBATCH,
        "hpcrun checks the time limit against job.signal_lead",
        _flag("time"),
    ),
    OptionRule(
        ["time"],
        SRUN,
        "the ranks would end at this limit without a save and a requeue",
        _flag("time"),
    ),
    OptionRule(["nodes"], BOTH, "hpcrun sets the number of nodes", _flag("nodes")),
    OptionRule(
        [
            *("ntasks", "ntasks-per-node", "tasks-per-node", "ntasks-per-gpu", "ntasks-per-tres"),
        ],
        BOTH,
        "hpcrun sets the number of tasks, which are the ranks",
        _RANKS,
    ),
    OptionRule(
        ["overcommit"],
        SBATCH,
        "without exclusive nodes, Slurm ignores the number of tasks per node",
        "use --cpus-per-task",
        refused=False,
    ),
    OptionRule(
        ["array"],
        SBATCH,
        "an array would start the same run several times in parallel",
        "submit several runs with --sweep KEY=VALUES",
    ),
    OptionRule(
        ["output", "error"],
        SBATCH,
        "hpcrun reads Slurm's messages in the run's own log",
        "remove the option",
    ),
    OptionRule(
        ["output", "error"], SRUN, _NO_OUTPUT, "remove the option; `hpcrun logs` shows them"
    ),
    OptionRule(
        ["open-mode"],
        SBATCH,
        "a restart would erase the log of the earlier starts",
        "remove the option",
        fits=lambda value: (value or "").lower() in ("a", "append"),
    ),
    OptionRule(
        ["clusters", "cluster"],
        BOTH,
        "a job goes to the cluster of the host that submits it",
        "submit from a login host of the other cluster (--host HOST)",
    ),
    OptionRule(
        ["no-requeue"],
        SBATCH,
        "Slurm does not start the job again after the loss of its first node; other restarts become new "
        "jobs",
        "for fewer restarts use restarts.crash=0, restarts.preemption=0 and the like",
        refused=False,
    ),
    OptionRule(
        ["exclude"],
        SBATCH,
        "would replace hpcrun's list of nodes that failed",
        _flag("exclude"),
    ),
    OptionRule(
        ["wait"],
        SBATCH,
        "the submission would wait for the end of the job",
        "use --follow",
    ),
    OptionRule(
        ["quiet"],
        SBATCH,
        "sbatch would not print the job's number, which hpcrun needs",
        "remove the option",
    ),
    OptionRule(["test-only"], BOTH, "Slurm would start nothing", "use --dry-run"),
    OptionRule(["help", "usage", "version", "autocomplete"], BOTH, _PRINTS, "remove the option"),
    OptionRule(["external"], SBATCH, "the job would start nothing", "remove the option"),
    OptionRule(
        ["wrap"],
        SBATCH,
        "sbatch takes it without a script only",
        lambda value: f"write the command last: -- {value}".rstrip(),
    ),
    OptionRule(
        ["uid", "gid"],
        BOTH,
        "the job would belong to another user, who cannot write the run's files",
        "submit as that user",
    ),
    OptionRule(
        ["chdir"],
        BOTH,
        "does not move the ranks, which work in the folder of the submission",
        "submit from that folder",
        refused=False,
    ),
    OptionRule(
        ["no-kill"],
        BOTH,
        "hpcrun decides what the loss of a node ends",
        "remove the option",
        fits=lambda value: (value or "").lower() != "off",
    ),
    OptionRule(
        ["export"],
        SRUN,
        "the ranks need the variables of the batch script",
        _export_remedy,
        fits=_keeps_all,
    ),
    OptionRule(
        ["kill-on-bad-exit"],
        SRUN,
        "the other ranks would wait for a dead rank until the time limit",
        "remove the option",
        fits=lambda value: not _is_zero(value),
    ),
    OptionRule(
        ["wait"],
        SRUN,
        "srun would kill ranks that still save after the end of the first",
        "remove the option",
        fits=_is_zero,
    ),
    OptionRule(
        ["nodelist", "exclude", "relative", "nodefile"],
        SRUN,
        "hpcrun chooses the nodes of the ranks at each start",
        "use --exclude NODES, or --nodelist in job.sbatch_args",
    ),
    OptionRule(
        ["job-name"],
        SRUN,
        "hpcrun finds the ranks by the name of their step",
        "use --name, or --job-name in job.sbatch_args",
    ),
    OptionRule(
        ["jobid"],
        SRUN,
        "the ranks would start in another job",
        "remove the option",
    ),
    OptionRule(
        ["het-group", "pack-group"],
        SRUN,
        "a heterogeneous job is not supported",
        "request all nodes in one component",
    ),
    OptionRule(
        ["multi-prog"],
        SRUN,
        "srun would read hpcrun's interpreter as a list of programs",
        "start the programs by their rank in one script: -- bash ranks.sh",
    ),
    OptionRule(["pty"], SRUN, _NO_OUTPUT, "remove the option; `hpcrun logs -f` follows them"),
    OptionRule(
        ["async"],
        SRUN,
        "srun would return before the ranks have started",
        "remove the option",
    ),
    OptionRule(
        ["external-launcher", "interactive", "no-allocate"],
        SRUN,
        "srun would not start a task per rank with the job's resources",
        "remove the option",
    ),
    OptionRule(
        ["bcast"],
        SRUN,
        "would start a copy of the interpreter, which finds no packages",
        "copy files to the nodes in job.node_setup",
    ),
)
"""All rules; a test names each of their options."""
