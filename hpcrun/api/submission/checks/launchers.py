"""Checks of commands that start ranks themselves.

hpcrun starts the command once per task. A program that starts ranks, started by each task, trains several
models at the same time, or waits for resources that the tasks have.
"""

import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path

from hpcrun.api.submission.checks.concern import Concern, Submission
from hpcrun.config.commands.starters import (
    JOB_STARTERS,
    LAUNCHERS,
    MPI_STARTERS,
    PYTHON,
    SHELLS,
    STEP_STARTERS,
    RankStarter,
    rank_starters,
    read_script,
    shell_program,
)
from hpcrun.config.slurm_options import joined_words, parse_options

_OWN_RENDEZVOUS = re.compile(
    r"--(?:nnodes|num[-_]machines|num[-_]nodes)[ =](?!1\b)"
    r"|--(?:rdzv[-_]endpoint|node[-_]rank|machine[-_]rank|hostfile)\b"
)
# The options of each launcher for the number of nodes, for the ranks of a node, and for all ranks.
_COUNTS = {
    "torchrun": ("nnodes", "nproc-per-node", None),
    "accelerate": ("num-machines", None, "num-processes"),
    "deepspeed": ("num-nodes", "num-gpus", None),
}
# torchrun reads PET_NNODES as its option --nnodes, and accelerate reads its options from a file.
_RENDEZVOUS_VARIABLES = frozenset({"PET_NNODES", "PET_NODE_RANK", "PET_RDZV_ENDPOINT"})
_CONFIG_FILE = re.compile(r"--config[-_]file[ =](\S+)")
_SEVERAL_MACHINES = re.compile(r"^\s*[\"']?num_machines[\"']?\s*:\s*(?!1\b)\d", re.MULTILINE)
_PRINT = frozenset({"-V", "-h", "--help", "--usage", "--version"})
# Words of `accelerate launch`, `uv run torchrun` and `python -m torch.distributed.run`.
_PARTS_OF_NAMES = frozenset(
    """
    accelerate accelerate.commands.launch deepspeed launch run torch.distributed.launch
    torch.distributed.run torchrun
    """.split()  # noqa: SIM905
)
_PROGRAM = re.compile(r"(?:python(?:3(?:\.\d+)?)?|.*\.(?:py|sh))")


def nested_steps(submission: Submission) -> Iterator[Concern]:
    """Find an srun in the command: it waits for the resources of the step in which it runs."""
    found = _starter(submission)
    if found is None or found.name not in STEP_STARTERS:
        return
    _, program = _split(found.words)
    shares = _shares_the_step(submission, found)
    if shares and submission.copies == 1:
        return
    what = (
        f"each of the {submission.copies} tasks would start more ranks"
        if shares
        else "an srun inside a step waits for the resources of this step"
    )
    remedy = f"write the command without srun: -- {program or 'COMMAND'}"
    if not found.direct and _is_helper(program):
        remedy = f"write this line without srun: {program}"
    yield Concern(
        f"{shlex.join(found.words)[:80]}: hpcrun starts the command with srun, once per rank; {what}; "
        f"{remedy}",
        refused=found.direct and not shares,
    )


def nested_jobs(submission: Submission) -> Iterator[Concern]:
    """Find an sbatch or salloc in the command: hpcrun would not see the job."""
    found = _starter(submission)
    if found is None or found.name not in JOB_STARTERS:
        return
    _, program = _split(found.words)
    if found.name == "sbatch":
        program = started_by(submission, program) or "COMMAND"
    yield Concern(
        f"{shlex.join(found.words)[:80]}: each of the {submission.copies} tasks would submit a job that "
        "hpcrun neither watches nor restarts; hpcrun submits the job itself, so write the program after "
        f"`--`: -- {program or 'COMMAND'}",
        refused=found.direct,
    )


def nested_mpi(submission: Submission) -> Iterator[Concern]:
    """Find an mpirun that several tasks start."""
    found = _starter(submission)
    if found is None or found.name not in MPI_STARTERS or submission.copies == 1:
        return
    program = _from_program(found.words) or "COMMAND"
    yield Concern(
        f"{found.name} starts its own ranks, and each of the {submission.copies} tasks would start it; write "
        f"the command without {found.name}: -- {program} (with MPI: 'job.srun_args=[--mpi=pmi2]'), or give "
        "it one task: --nodes 1 --launcher none",
        refused=found.direct,
    )


def separate_trainings(submission: Submission) -> Iterator[Concern]:
    """Find a launcher of PyTorch that several tasks start, each for itself."""
    found, job = _starter(submission), submission.config.job
    if found is None or _launcher(found) is None or submission.copies == 1:
        return
    if _has_own_rendezvous(submission, found):
        return
    launcher = "accelerate" if _launcher(found) == "accelerate" else "torchrun"
    script = _from_script(found.words) or "train.py"
    tasks = f"{submission.copies} tasks ({job.max_nodes} x {job.tasks_on_node})"
    yield Concern(
        f"{found.name} starts its own ranks, and each of the {tasks} would start it: "
        f"{submission.copies} separate trainings; `--launcher {launcher} -- {script}` starts one training "
        "over all nodes",
        refused=found.direct,
    )


def other_counts(submission: Submission) -> Iterator[Concern]:
    """Find a launcher with other numbers of nodes or ranks than the job."""
    command, job = submission.config.command, submission.config.job
    if job.launcher is not None:
        before = " ".join(command[: _script_index(command)])
        yield from _unequal(submission, job.launcher, before, set_by_hpcrun=True)
        return
    found = _starter(submission)
    name = None if found is None else _launcher(found)
    if found is not None and name is not None:
        if submission.copies > 1 and not _has_own_rendezvous(submission, found):
            return
        yield from _unequal(submission, name, found.options, direct=found.direct)


def _unequal(
    submission: Submission,
    launcher: str,
    options: str,
    *,
    direct: bool = False,
    set_by_hpcrun: bool = False,
) -> Iterator[Concern]:
    job = submission.config.job
    if job.elastic:
        return
    nodes, per_node, ranks = _COUNTS[launcher]
    for option, wanted, flag in (
        (nodes, submission.copies, "--nodes"),
        (per_node, job.gpus, "--gpus"),
        (ranks, job.max_nodes * job.gpus, "--nodes and --gpus"),
    ):
        given = None if option is None else _number(options, option)
        if given is None or given == wanted:
            continue
        if set_by_hpcrun:
            yield Concern(
                f"--{option} {given}: hpcrun passes --{option} {wanted} to {launcher}, from {flag}; remove "
                "the option",
                refused=True,
            )
        elif option == nodes:
            yield Concern(
                f"--{option} {given}: {launcher} waits for {given} starts, but the job starts it "
                f"{wanted} times; `--launcher torchrun -- train.py` with {flag} {given} sets both",
                refused=direct and given > wanted,
            )
        else:
            yield Concern(
                f"--{option} {given}: {launcher} starts {given} ranks there, but the job has {wanted} GPUs "
                f"or CPUs for ranks ({flag}); use equal numbers"
            )


def started_by(submission: Submission, script: str) -> str:
    """Return the command that the batch script ``script`` starts, without srun; empty if it is not known."""
    words = shlex.split(script)
    text = shell_program(["bash", *words], submission.folder) if words else None
    return program_of(text or "")


def program_of(text: str) -> str:
    """Return the training command in the text of a batch script, without srun; empty if there is none."""
    for line in text.splitlines():
        words = _plain_words(line)
        if words and Path(words[0]).name in STEP_STARTERS | MPI_STARTERS:
            return _from_program(words) or _split(words)[1]
        if words and (PYTHON.fullmatch(Path(words[0]).name) or words[0] == "torchrun"):
            return shlex.join(words)
    return ""


def _plain_words(line: str) -> list[str]:
    try:
        return shlex.split(line, comments=True)
    except ValueError:  # a quote over several lines
        return []


def _starter(submission: Submission) -> RankStarter | None:
    config = submission.config
    if not config.command or config.job.launcher is not None:
        return None
    found = rank_starters(config.command, submission.folder)
    return next(
        (one for one in found if not (_only_prints(one) or _is_helping_step(submission, one))), None
    )


def _only_prints(found: RankStarter) -> bool:
    """Return True for ``torchrun --help`` and the like: options only, and the last prints a text."""
    *options, last = found.words[1:] or [""]
    started = [word for word in options if not (word.startswith("-") or word in _PARTS_OF_NAMES)]
    return last in _PRINT and not started


def _is_helping_step(submission: Submission, found: RankStarter) -> bool:
    """Return True for a line such as ``srun --overlap nvidia-smi`` in a script, which ends by itself."""
    return (
        not found.direct
        and found.name in STEP_STARTERS
        and _is_helper(_split(found.words)[1])
        and _shares_the_step(submission, found)
    )


def _shares_the_step(submission: Submission, found: RankStarter) -> bool:
    options, _ = _split(found.words)
    if any(option.name == "overlap" for option in parse_options("srun", options)):
        return True
    return "SLURM_OVERLAP" in " ".join([*submission.config.command, *submission.config.job.env])


def _is_helper(program: str) -> bool:
    """Return True for a program of the system: no interpreter, launcher, shell, variable or path."""
    name = program.partition(" ")[0]
    trains = PYTHON.fullmatch(name) or name in SHELLS | LAUNCHERS
    return bool(re.fullmatch(r"[a-z][\w-]*", name)) and not trains


def _has_own_rendezvous(submission: Submission, found: RankStarter) -> bool:
    """Return True if the starts of a launcher may meet, by its options, variables or config file."""
    if _OWN_RENDEZVOUS.search(found.options):
        return True
    if _launcher(found) == "torchrun":
        return bool(_RENDEZVOUS_VARIABLES & set(submission.config.job.env))
    file = _CONFIG_FILE.search(found.options)
    text = read_script(submission.folder / file[1]) if file else ""
    return bool(_SEVERAL_MACHINES.search(text))


def _launcher(found: RankStarter) -> str | None:
    """Return the launcher of PyTorch that ``found`` is, as `_COUNTS` names it."""
    if found.name.startswith("python -m torch.distributed"):
        return "torchrun"
    return next((name for name in _COUNTS if name in found.name), None)


def _split(words: Sequence[str]) -> tuple[list[str], str]:
    """Return the options of ``srun OPTIONS COMMAND``, and the command; sbatch and salloc have these too."""
    at = 1
    while at < len(words) and words[at].startswith("-"):
        alone = len(joined_words("srun", [words[at], "x"])) == 2
        at += 1 if alone else 2
    return [*words[1:at]], shlex.join(words[at:])


def _from_program(words: Sequence[str]) -> str:
    """Return the words from the interpreter or script on."""
    names = [Path(word).name for word in words]
    at = next((at for at, name in enumerate(names) if at and _PROGRAM.fullmatch(name)), None)
    return "" if at is None else shlex.join(words[at:])


def _script_index(words: Sequence[str]) -> int:
    return next((at for at, word in enumerate(words) if word.endswith(".py")), len(words))


def _from_script(words: Sequence[str]) -> str:
    return shlex.join(words[_script_index(words) :])


def _number(options: str, name: str) -> int | None:
    """Return the plain number that ``options`` give to ``--name``, with - or _ in it; None: none."""
    found = re.search(rf"--{name.replace('-', '[-_]')}[ =](\d+)(?=\s|$)", options)
    return int(found[1]) if found else None
