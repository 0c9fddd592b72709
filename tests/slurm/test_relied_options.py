"""Options of sbatch and srun that would replace a line of hpcrun are refused, others are not."""

from __future__ import annotations

import pytest

from hpcrun.slurm.relied_options import RULES, objections

REFUSED = {
    "sbatch": {
        "--signal=B:USR1@60": "use job.warn_signal=USR1 and job.signal_lead=60",
        "--sig=SIGTERM@30": "use job.warn_signal=TERM and job.signal_lead=30",
        "--signal=R:12@120": "use job.warn_signal=USR2 and job.signal_lead=120",
        "--signal=BR:HUP": "use job.warn_signal and job.signal_lead",
        "--signal=": "use job.warn_signal and job.signal_lead",
        "-t 0:30": "use --time 0:30",
        "--time=5": "use --time 5",
        "-N2-4": "use --nodes 2-4",
        "--nodes=2": "use --nodes 2",
        "-n1": "use --nodes and --gpus",
        "--ntasks=1": "use --nodes and --gpus",
        "--ntasks-per-node=1": "job.tasks_per_node",
        "--tasks-per-node=1": "job.tasks_per_node",
        "--ntasks-per-gpu=2": "job.tasks_per_node",
        "--ntasks-per-tres=2": "job.tasks_per_node",
        "--hold --ntasks=1": "use --nodes and --gpus",
        "-a0-3": "--sweep KEY=VALUES",
        "--arr=0-3": "an array would start the same run several times",
        "--output=x": "remove the option",
        "--err=x": "hpcrun reads Slurm's messages",
        "--open-mode=truncate": "a restart would erase",
        "-Mbig": "a job goes to the cluster of",
        "--cluster=big": "--host HOST",
        "--exclude=n1": "use --exclude n1",
        "-x n1": "use --exclude n1",
        "-W": "use --follow",
        "-Q": "the job's number",
        "--test-only": "use --dry-run",
        "--usage": "start nothing",
        "--help": "start nothing",
        "-V": "start nothing",
        "--autocomplete=x": "start nothing",
        "--external": "start nothing",
        "--wrap=python t.py": "-- python t.py",
        "--uid=1": "submit as that user",
        "--gid=1": "submit as that user",
        "--no-kill=off": "the loss of a node",
    },
    "srun": {
        "--signal=USR1@60": "use job.warn_signal=USR1",
        "--time=5": "would end at this limit",
        "-N1": "use --nodes 1",
        "--nt=1": "use --nodes and --gpus",
        "-ln1": "use --nodes and --gpus",
        "-o x": "hpcrun logs",
        "--error=x": "hpcrun logs",
        "--kill-on-bad-exit=0": "wait for a dead rank",
        "-K0": "wait for a dead rank",
        "--wait=5": "still save",
        "-W5": "still save",
        "--export=NONE": "job.env.NAME=VALUE",
        "--export=A=b": "job.env.A=b",
        "--nodelist=n1": "use --exclude NODES",
        "-xn1": "use --exclude NODES",
        "-r1": "at each start",
        "--nodefile=x": "at each start",
        "-J x": "use --name",
        "--jobid=3": "another job",
        "--het-group=1": "heterogeneous",
        "--pack-group=1": "heterogeneous",
        "--multi-prog": "list of programs",
        "--pty": "hpcrun logs -f",
        "--async": "before the ranks have started",
        "--external-launcher": "a task per rank",
        "--interactive": "a task per rank",
        "-Z": "a task per rank",
        "--bcast=/tmp/x": "finds no packages",
    },
}
LINES = {
    "sbatch": {
        "--no-requeue": "restarts.crash=0",
        "-O": "--cpus-per-task",
        "-D/x": "from that folder",
    },
    "srun": {"--chdir=/x": "submit from that folder"},
}
FINE = {
    "sbatch": (
        *("--comment=--ntasks=1", "--mail-type=END", "--no-kill", "--exclusive=user", "--requeue"),
        *("--open-mode=append", "--export=NONE", "--hold", "-pgpu", "-wn1", "--gres=gpu:4", "-c4"),
        *("--dependency=afterok:1", "--wait-all-nodes=1", "--nodefile=x", "--ntasks-per-core=1"),
        *("--constraint=a100", "--get-user-env", "--parsable", "-vv", "--job-name=x", "--new-option"),
    ),
    "srun": (
        *("--label", "-l", "--mpi=pmi2", "--cpu-bind=cores", "--gpu-bind=none", "--wait=0", "-K"),
        *("--kill-on-bad-exit=1", "--export=ALL,A=b", "--overlap", "--no-kill", "-u", "-v"),
        *("--task-prolog=x", "-m cyclic", "--gpus-per-task=1", "--container-image=x", "--network=x"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("program", ["sbatch", "srun"])
def test_an_option_that_hpcrun_sets_has_a_remedy(program, refused: bool) -> None:
    for item, part in (REFUSED if refused else LINES)[program].items():
        found = objections(program, ["--verbose", item])
        assert [one.refused for one in found] == [refused], item
        assert part in found[0].text, item
        assert (found[0].option.text, found[0].option.item) == (item, 1)


@pytest.mark.parametrize("program", ["sbatch", "srun"])
def test_other_options_pass_without_a_word(program) -> None:
    for item in FINE[program]:
        assert objections(program, [item]) == [], item


def test_every_rule_has_an_example() -> None:
    ruled = {(program, name) for rule in RULES for program in rule.programs for name in rule.names}
    shown = {
        (program, one.option.name)
        for examples in (REFUSED, LINES)
        for program, items in examples.items()
        for one in objections(program, [*items])  # type: ignore[arg-type]
    }
    # Rules for both programs need one example.
    left = {name for _, name in ruled - shown} - {name for _, name in shown}
    assert left == set()
