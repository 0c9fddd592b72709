"""The batch step: everything that a batch script does, from its first line to its exit code.

The lines, their limits (`ulimit`), folder (`cd`) and variables reach srun and the ranks, and no other
process: the process that classifies the end keeps the environment from sbatch.
"""

import contextlib
import fcntl
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from hpcrun import exit_codes, slurm
from hpcrun.config import Config, Job
from hpcrun.devices.devices import GPU_JOB
from hpcrun.errors import ClusterError, UserError
from hpcrun.job.ending import conclude, requeue_after_kill
from hpcrun.job.opening import may_begin
from hpcrun.job.ownership import require_own_number
from hpcrun.job.srun import (
    BatchJob,
    RanksEnd,
    in_container,
    launch_config,
    link_batch_log,
    node_setup_steps,
    preflight_steps,
    srun_command,
)
from hpcrun.job.step_messages import StepMessages
from hpcrun.job.step_process import STOP_SIGNALS, go_on, on_stop_signals
from hpcrun.nodes.job_nodes import JobNodes, RankHelpers
from hpcrun.nodes.kill_ranks import end_sruns
from hpcrun.nodes.late_kills import skip_numbers
from hpcrun.nodes.step_nodes import JobShape
from hpcrun.run import memory_keeper
from hpcrun.run.attempt import IN_PLACE, JOB_NAME, TASKS, Attempt
from hpcrun.run.directory import RunDirectory
from hpcrun.run.files import HeldFolder, make_log_folder
from hpcrun.run.journal.journal import Journal
from hpcrun.run.journal.opening import already_finished
from hpcrun.run.trust import SUBMITTED, ForeignRun, own_config
from hpcrun.slurm.batch_environment import (
    inherited_options,
    origin_of_script,
    own_variables,
)
from hpcrun.slurm.environment import export_from_environment
from hpcrun.slurm.notation import expand
from hpcrun.slurm.own_script import restart_problems, script_text
from hpcrun.slurm.placement import job_id

_READY = b"ready"
# The user's set-up lines are unlikely to use this number.
_FIRST_DESCRIPTOR = 200
# Seconds in which srun may end after SIGTERM.
_SRUN_END = 5.0
# A write of this size to a pipe is atomic (POSIX, PIPE_BUF).
_LONGEST = 3000
# Lines such as `module purge` may remove Slurm's programs from PATH, which checks of the nodes need too.
_KEEP_SLURM = 'type -P srun > /dev/null || export PATH="${{PATH:+$PATH:}}"{}'


def run_ranks(
    setup: Sequence[str],
    env: Mapping[str, str],
    steps: Sequence[Sequence[str]],
    environ: Mapping[str, str],
    nodes: JobNodes | None = None,
    hasten: Callable[[int], None] | None = None,
) -> RanksEnd:
    """Run ``setup``, set ``env``, and run ``steps`` one after the other, up to the first that fails.

    Slurm signals every process of the batch script itself, so no signal is passed on.

    Args:
        setup: shell lines; after a line that fails, no step starts.
        env: variables for the ranks only.
        steps: the srun commands; the last starts the ranks.
        environ: the environment of the first line. The steps use the srun of its PATH, whatever the set-up
            does to PATH.
        nodes: ends the steps when it loses one of them.
        hasten: ends a step with a failed rank; see :class:`StepMessages`.

    Raises:
        OSError: bash cannot be started.
    """
    reading, writing = os.pipe()
    report = fcntl.fcntl(writing, fcntl.F_DUPFD, _FIRST_DESCRIPTOR)
    os.close(writing)
    os.set_blocking(reading, False)
    child: subprocess.Popen[bytes] | None = None
    stuck = list[str]()

    def give_up(why: str) -> None:
        print(f"hpcrun: Slurm creates no step: {why}; srun is ended", flush=True)
        stuck.append(why)
        if child is not None:
            end_sruns(child, _SRUN_END, ask=True)

    messages = StepMessages(hasten, give_up=give_up)
    try:
        exports, values = export_from_environment(env)
        srun = shutil.which("srun", path=environ.get("PATH"))
        steps = [[srun, *step[1:]] if srun and step[0] == "srun" else step for step in steps]
        variables = None if nodes is None else nodes.variables_file()
        script = shell_script(
            setup, exports, steps, report, messages.descriptor, variables, srun=srun
        )
        kept = [] if variables is None else [variables]
        try:
            child = subprocess.Popen(
                ["bash", "-c", script, "hpcrun"],
                env={**environ, **values},
                pass_fds=[report, messages.descriptor, *kept],
            )
        finally:
            messages.begin()
        os.close(report)
        report = -1
        with contextlib.nullcontext() if nodes is None else nodes.watch_step(child):
            # Now, and not between the end of the ranks and their next start. It loads hundreds of modules,
            # which an upgrade of hpcrun may replace while the ranks run.
            import hpcrun.job.ending  # noqa: F401

            code = child.wait()
        messages.finish()
        try:
            words = os.read(reading, 2 * _LONGEST)
        except BlockingIOError:
            # A background process of the set-up may keep the other end open.
            words = b""
    finally:
        os.close(reading)
        if report >= 0:
            os.close(report)
    code = code if code >= 0 else 128 - code
    if words.startswith(_READY):
        return RanksEnd(code, stuck=stuck[0] if stuck else None)
    number, _, command = words.decode(errors="replace").partition(" ")
    if not number.isdecimal():
        return RanksEnd(code, "job.setup")
    return RanksEnd(int(number), command)


def shell_script(
    setup: Sequence[str],
    exports: Sequence[str],
    steps: Sequence[Sequence[str]],
    report: int,
    messages: int,
    variables: int | None = None,
    *,
    srun: str | None = None,
) -> str:
    """Return the text for bash, which writes the failed line or "ready" to descriptor ``report``.

    The programs of ``steps`` write their errors to descriptor ``messages``. The shell writes its variables to
    the file ``variables``. ``srun`` is the path of srun before the set-up.
    """
    return "\n".join(
        [
            "set -e",
            f'hpcrun_failed() {{ printf "%s %s" "$1" "${{2:0:{_LONGEST}}}" >&{report}; exit "$1"; }}',
            'trap \'hpcrun_failed "$?" "$BASH_COMMAND"\' EXIT',
            *setup,
            *exports,
            *([_KEEP_SLURM.format(shlex.quote(os.path.dirname(srun)))] if srun else []),  # noqa: PTH120
            # Only here: module and conda read variables that are not set.
            "set -u",
            # Not a trap that the set-up has made its own.
            'case "$(trap -p EXIT)" in *hpcrun_failed*) trap - EXIT ;; esac',
            # Slurm signals this shell too: with a trap it outlives srun.
            "trap : TERM USR1 USR2",
            *([f"env -0 >&{variables} || true"] if variables is not None else []),
            f"printf {_READY.decode()} >&{report}",
            f"exec {report}>&-",
            "code=0",
            f"{{ {' && '.join(shlex.join(step) for step in steps)}; }} 2>&{messages} || code=$?",
            "exit $code",
        ]
    )


def run_step(
    run: RunDirectory,
    *,
    own_script: bool,
    failed: str | None = None,
    code: int = 1,
    submitted: str | None = None,
) -> int:
    """Run the job's part of ``run`` and return the exit code for the batch script.

    Args:
        own_script: a person wrote the batch script; the run's `job:` section does not count.
        failed: the command of a person's own batch script that failed before the ranks; no rank starts then.
        code: its exit code.
        submitted: the digest of the submitted config, which the batch script has.

    Raises:
        UserError: this is no batch script, there is no run, the run is not this user's or not what was
            submitted, or another cluster's job has its number.
    """
    # Slurm signals all processes of the batch script: this process must outlive the ranks, which save.
    on_stop_signals(go_on)
    if own_script:
        for line in restart_problems(script_text(os.getppid()), os.environ):
            print(f"hpcrun: the batch script has {line}", flush=True)
    job = take_over_variables()
    _require_submitted(run, submitted)
    again = note_begun(run)
    try:
        ended = _run_attempts(run, job, own_script, failed, code, again=again)
    except UserError:
        # With the file, the batch script starts this program again, as after an unexpected error.
        forget_begun(run)
        raise
    forget_begun(run)
    return ended


def _require_submitted(run: RunDirectory, submitted: str | None) -> None:
    """Check the run's owner and config before anything is written; the ranks check them once more.

    Raises:
        ForeignRun: the run is not this user's, or not what was submitted.
    """
    # The value of the job in which this job was submitted.
    os.environ.pop(SUBMITTED, None)
    if submitted:
        os.environ[SUBMITTED] = submitted
    try:
        own_config(run, submitted)
    except ForeignRun:
        # With the file, the batch script starts this program again.
        with contextlib.suppress(OSError):
            run.unstarted(os.environ["SLURM_JOB_ID"]).unlink(missing_ok=True)
        raise
    except OSError:
        # No run, or a file server that does not answer: later steps report it.
        return


def _run_attempts(
    run: RunDirectory,
    job: BatchJob,
    own_script: bool,
    failed: str | None = None,
    code: int = 1,
    *,
    again: bool,
) -> int:
    """Run attempts until the last of this start of the job; ``again``: a batch step of it was killed."""
    folder = _opened_folder(run)
    attempt = job.attempt
    # A file server that does not answer costs the attempt and not the run.
    with contextlib.suppress(OSError):
        require_own_number(run, attempt, Journal(run).read())
    if own_script:
        _prepare_logs(run, attempt)
    if again and failed is None and run.attempt_logs(attempt).exists():
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        return requeue_after_kill(run, job, own_script=own_script)
    _mark(attempt)
    if failed is None and _is_finished(run, attempt):
        print(f"hpcrun: {run.name} is finished: there is nothing left to train", flush=True)
        return exit_codes.DONE
    nodes = None if failed is not None else _watched_nodes(run, attempt, own_script)
    with contextlib.nullcontext() if nodes is None else contextlib.closing(nodes):
        first = None if failed is None else RanksEnd(code, failed)
        return _run_in_turn(run, job, own_script, folder, nodes, first)


def _run_in_turn(
    run: RunDirectory,
    job: BatchJob,
    own_script: bool,
    folder: HeldFolder | None,
    nodes: JobNodes | None,
    ranks: RanksEnd | None,
) -> int:
    """Run one attempt after the other inside the allocation; return the exit code for the batch script.

    Args:
        ranks: the end of the first attempt, if it has ended already.
    """
    if ranks is None:
        skip_numbers(run, job.attempt)
    while True:
        ranks = ranks or start_ranks(run, job.attempt, nodes, own_script=own_script)
        # From here on no rank runs, and a signal must not end the programs that requeue the job.
        signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        if folder is not None and _was_deleted(folder):
            # A new run may have this name: this job must not write its log and its result.
            print(f"hpcrun: {run.path} was deleted while the job ran; the job ends", flush=True)
            return exit_codes.FAILED
        end = conclude(run, job, ranks, nodes=nodes, own_script=own_script)
        ranks = None
        if end.following is None:
            return end.code
        job = replace(job, attempt=end.following)
        _mark(job.attempt)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _watched_nodes(run: RunDirectory, attempt: Attempt, own_script: bool) -> JobNodes | None:
    """Return the nodes of this job with a watch over them; None as :func:`_nodes_of_job`."""
    try:
        config = launch_config(run, own_script=own_script)
    except (UserError, OSError):
        # The start of the ranks reports it.
        return None
    return _nodes_of_job(run, attempt, config, os.environ)


def _nodes_of_job(
    run: RunDirectory, attempt: Attempt, config: Config, environ: Mapping[str, str]
) -> JobNodes | None:
    """Return the nodes of this job; None if the job starts no further step."""
    hosts, job = environ.get("SLURM_JOB_NODELIST"), config.job
    if not config.restarts.in_place or hosts is None:
        return None
    nodes = tuple(expand(hosts))
    # sbatch_args may change the number of nodes.
    wanted = job.nodes if job.elastic else len(nodes) - job.spares
    shape = JobShape(nodes, wanted, job.tasks_on_node)
    own = environ.get("SLURMD_NODENAME") or nodes[0]
    # A script imports its libraries itself, and a container has other files.
    forks = not (config.command or job.container or job.image)
    helpers = RankHelpers(
        memory=memory_keeper.new_key(),
        # The agents of a killed batch step end, and their fork servers with them.
        fork=f"{os.getuid()}-{attempt.owner}-{secrets.token_hex(4)}" if forks else None,
        python=job.python,
    )
    gpus = 0 if job.cpu else job.gpus
    return JobNodes(run, attempt, shape, own, gpus=gpus, helpers=helpers)


def _mark(attempt: Attempt) -> None:
    """Print the first line of the attempt where Slurm's own messages go."""
    hosts = os.environ.get("SLURM_JOB_NODELIST")
    print(f"hpcrun: attempt {attempt.owner} on {hosts}", file=sys.stderr, flush=True)


def start_ranks(
    run: RunDirectory, attempt: Attempt, nodes: JobNodes | None, *, own_script: bool = False
) -> RanksEnd:
    """Run the ranks of ``attempt`` after the set-up of its nodes, and return their end."""
    config = launch_config(run, own_script=own_script)
    # Before the folder of the logs: after a kill of this process in between, the next one starts here again.
    if not may_begin(run, attempt, config, "slurm"):
        return RanksEnd(exit_codes.BAD_INPUT, refused=True)
    job = in_container(run, config.job)
    environ: Mapping[str, str] = os.environ
    if nodes is not None:
        try:
            nodes.next_step(attempt)
        except ClusterError as error:
            print(f"hpcrun: {error}", flush=True)
            return RanksEnd(exit_codes.FAILED, started=False)
        environ = nodes.variables(environ)
        args, given = [*nodes.options(), *job.srun_args], {**nodes.helpers.variables, **job.env}
        job = job.model_copy(update={"srun_args": args, "env": given})
    # srun sets SLURM_JOB_NAME to the name of the step.
    named = {JOB_NAME: environ.get("SLURM_JOB_NAME", "")}
    env = {**job.env, **named, IN_PLACE: str(attempt.in_place)}
    if not own_script:
        env[TASKS] = str(_tasks(config.job, environ))
    if not job.cpu:
        env[GPU_JOB] = environ["SLURM_JOB_ID"]
    try:
        make_log_folder(run.attempt_logs(attempt))
        steps = [srun_command(run, attempt, job, environ)]
        if not attempt.in_place:
            before = node_setup_steps(run, attempt, job, environ)
            steps = [*before, *preflight_steps(run, job), *steps]
        elif nodes is not None and (new := nodes.unprepared):
            # The other nodes of the job stay prepared.
            placed = [f"--nodes={len(new)}", f"--nodelist={','.join(new)}"]
            there = job.model_copy(update={"srun_args": [*job.srun_args, *placed]})
            before = node_setup_steps(run, attempt, there, environ)
            own = [f"{name}={value}" for name, value in nodes.variables({}, new).items()]
            checks = [["env", *own, *words] for words in preflight_steps(run, job)]
            steps = [*before, *checks, *steps]
        # A script may save on SIGTERM.
        saves = bool(config.command) or own_script
        hasten = None if nodes is None or saves else partial(_kill_ranks, nodes)
        return run_ranks(job.setup, env, steps, environ, nodes, hasten)
    except UserError as error:
        print(f"hpcrun: {error}", flush=True)
        return RanksEnd(exit_codes.BAD_INPUT)
    except OSError as error:
        # The cause is this node or temporary, so another start may help.
        print(f"hpcrun: srun cannot be started: {error}", flush=True)
        return RanksEnd(exit_codes.FAILED)


def _tasks(job: Job, environ: Mapping[str, str]) -> int:
    """Return the number of tasks that a step of the job has by its config.

    Args:
        environ: the environment of the step's srun; with a range of nodes, its nodes count.
    """
    given = environ.get("SLURM_JOB_NUM_NODES", "")
    nodes = int(given) if job.elastic and given.isdecimal() else job.max_nodes
    return nodes * job.tasks_on_node


def _kill_ranks(nodes: JobNodes, step: int) -> None:
    """Kill ranks that do not answer SIGTERM; a save in progress ends committed or absent (invariant 4)."""
    print("hpcrun: kills the ranks that do not answer SIGTERM", flush=True)
    if problem := nodes.kill_ranks([step]):
        print(f"hpcrun: they are not killed before KillWait: {problem}", flush=True)


def take_over_variables() -> BatchJob:
    """Remove the variables of other jobs from this process's environment; return this start of the job."""
    number = os.environ.get("SLURM_JOB_ID")
    if number is None:
        raise UserError("batch: SLURM_JOB_ID is not set; batch scripts call this, not people")
    shown = slurm.run(slurm.scontrol_show_job_command(number))
    facts = slurm.parse_show_job(shown.stdout, number) if shown.returncode == 0 else {}
    origin = origin_of_script(os.getppid())
    own = own_variables(os.environ, facts, origin)
    if lost := inherited_options(os.environ, facts, origin):
        print(
            f"hpcrun: {', '.join(lost)}: of the shell or job that has submitted this job, not passed on to "
            "the ranks; sbatch's options and the lines of the batch script count",
            flush=True,
        )
    os.environ.clear()
    os.environ.update(own)
    if "SLURM_HET_SIZE" in own:
        raise UserError(
            "batch: a heterogeneous job is not supported; request all nodes in one component"
        )
    attempt = Attempt(job_id(own) or number, int(own.get("SLURM_RESTART_COUNT") or 0))
    return BatchJob(attempt, slurm.unix_time(facts.get("EndTime", "Unknown")))


def _prepare_logs(run: RunDirectory, attempt: Attempt) -> None:
    try:
        run.logs.mkdir(exist_ok=True)
        link_batch_log(run, attempt)
    except OSError as error:
        print(f"hpcrun: {run.logs}: {error.strerror}; Slurm's messages are not read", flush=True)


_BEGUN = "begun "


def note_begun(run: RunDirectory) -> bool:
    """Note for the batch script that its interpreter has started; return True if one was killed before.

    The batch script starts this program again as long as the file is there, and counts its lines.
    """
    path = run.unstarted(os.environ["SLURM_JOB_ID"])
    try:
        before = path.read_text()
        path.write_text(_BEGUN)
    except OSError:
        return False
    return before.startswith(_BEGUN)


def forget_begun(run: RunDirectory) -> None:
    """Remove the file that makes the batch script start this program again."""
    try:
        run.unstarted(os.environ["SLURM_JOB_ID"]).unlink(missing_ok=True)
    except OSError as error:
        print(
            f"hpcrun: {error.filename}: cannot be removed: {error.strerror}; remove it by hand",
            flush=True,
        )


def _opened_folder(run: RunDirectory) -> HeldFolder | None:
    """Return the run directory's identity; None if the file server does not answer.

    Raises:
        UserError: there is no run.
    """
    try:
        if run.config.exists():
            return HeldFolder(run.path)
    except OSError:
        # A file server that does not answer is no proof of a deletion.
        return None
    raise UserError(
        f"{run.path}: no such run; make it with `hpcrun submit --prepare`; `hpcrun status` lists the runs"
    )


def _was_deleted(folder: HeldFolder) -> bool:
    try:
        return not folder.is_there()
    except OSError:
        return False


def _is_finished(run: RunDirectory, attempt: Attempt) -> bool:
    if attempt.restart == 0:
        return False
    try:
        return already_finished(run, attempt)
    except OSError:
        return False
