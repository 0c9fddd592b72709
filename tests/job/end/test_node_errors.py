"""An error of the input ends a run, unless an earlier start has worked: then the nodes are the cause."""

import time
from pathlib import Path

import pytest

from hpcrun.diagnose.finding import find_cause
from hpcrun.diagnose.run_lines import lines_of_attempt
from hpcrun.errors import NotDeterministic
from hpcrun.job.finalize import Classification, finalize
from hpcrun.job.opening import open_attempt
from hpcrun.job.policy import Budgets
from hpcrun.job.scheduler_view import Ending
from hpcrun.ranks.script.end import ScriptEnd, record_end
from hpcrun.run.attempt import Attempt
from hpcrun.run.directory import RunDirectory, RunError, create
from hpcrun.run.endings import Failure, record_failure, write_failure
from hpcrun.run.failures.script_log import ScriptError, script_error
from hpcrun.run.files import make_log_folder
from hpcrun.run.journal.events import Cause
from hpcrun.run.journal.state import State
from tests.support.journal import record_event

FIRST, SECOND = Attempt("7", 0), Attempt("7", 1)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = create(tmp_path / "a", "x", {})
    record_event(run, "submitted", job="7", executor="slurm")
    return run


def failed_setup(run: RunDirectory, attempt: Attempt) -> Classification:
    log = "7-0 on n1\n/tmp/slurm_script: line 9: module: command not found\n"
    return finalize(run, attempt, 127, Budgets(), Ending(log=log), setup="module load x")


def test_a_repeated_classification_gives_the_same_result(run: RunDirectory) -> None:
    assert failed_setup(run, FIRST) == failed_setup(run, FIRST)


def test_an_unknown_option_of_srun_fails_on_every_node(run: RunDirectory) -> None:
    log = "7-0 on n1\nsrun: unrecognized option '--nix'\n"
    classification = finalize(run, FIRST, 1, Budgets(), Ending(log=log))
    assert classification.cause is Cause.BAD_INPUT


def test_a_job_that_has_trained_stays_on_its_nodes(run: RunDirectory) -> None:
    open_attempt(run, FIRST, Budgets())
    record_event(run, "started", attempt=FIRST, step=0)
    finalize(run, FIRST, 1, Budgets())
    classification = failed_setup(run, SECOND)
    assert classification.cause is Cause.CRASH


def test_a_job_that_continues_a_training_is_no_bad_input(run: RunDirectory) -> None:
    open_attempt(run, FIRST, Budgets())
    finalize(run, FIRST, 1, Budgets())
    record_event(run, "submitted", job="8", executor="slurm", continues="7")
    assert failed_setup(run, Attempt("8", 0)).cause is Cause.CRASH


def opened(run: RunDirectory, attempt: Attempt, *, nodes: int = 2, script: bool = False) -> None:
    open_attempt(run, attempt, Budgets(), nodes=nodes, script=script)


def lacks(run: RunDirectory, attempt: Attempt, *ranks: int) -> None:
    """Let ``ranks``, two on each node, fail because of a missing file."""
    for rank in ranks:
        error = FileNotFoundError(2, "No such file or directory", "/scratch/train.pt")
        folder = run.attempt_logs(attempt)
        record_failure(folder, rank, error, None, f"n{rank // 2 + 1}", bad_input=True)


def ended(run: RunDirectory, attempt: Attempt, code: int = 2) -> Classification:
    return finalize(run, attempt, code, Budgets())


def test_a_file_that_all_nodes_lack_ends_the_run(run: RunDirectory) -> None:
    opened(run, FIRST)
    lacks(run, FIRST, 1, 2)
    assert (ended(run, FIRST).cause, run.result.exists()) == (Cause.BAD_INPUT, True)


def test_after_a_training_a_missing_file_is_a_crash(run: RunDirectory) -> None:
    opened(run, FIRST)
    record_event(run, "started", attempt=FIRST, step=0)
    finalize(run, FIRST, 143, Budgets(), Ending("preemption"))
    for restart in (1, 2):
        again = Attempt("7", restart)
        opened(run, again)
        record_event(run, "bad-input", attempt=again, reason="no data", kind="UserError", host="n1")
        classification = ended(run, again)
        assert classification.cause is Cause.CRASH


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("certain", "cause"), [(False, Cause.CRASH), (True, Cause.BAD_INPUT)])
def test_an_uncertain_refusal_after_a_save_is_a_crash(
    run: RunDirectory, nodes: int, certain: bool, cause: Cause
) -> None:
    """The file server may be unavailable at a restart, or the only node may lack the mount of the data."""
    opened(run, FIRST, nodes=nodes)
    record_event(run, "started", attempt=FIRST, step=0)
    record_event(run, "saved", attempt=FIRST, step=500)
    finalize(run, FIRST, 143, Budgets(), Ending("preemption"))
    opened(run, SECOND, nodes=nodes)
    record_event(
        run,
        "bad-input",
        attempt=SECOND,
        reason="data.path: there is nothing at /data",
        kind="ErrorOnAllRanks",
        host="n1",
        shared=True,
        certain=certain,
    )
    classification = ended(run, SECOND)
    assert (classification.cause, classification.decision.restart) == (cause, not certain)


def test_a_nondeterministic_kernel_is_so_on_every_node(run: RunDirectory) -> None:
    opened(run, FIRST)
    record_failure(run.attempt_logs(Attempt("7", 0)), 2, NotDeterministic("no"), 3, "n2")
    assert ended(run, FIRST).cause is Cause.BAD_INPUT


def test_a_successor_s_script_words_are_no_bad_input(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened(run, FIRST, script=True)
    record_event(run, "started", attempt=FIRST)
    ends = time.time() + 90.0
    monkeypatch.setattr(time, "time", lambda: ends)
    finalize(run, FIRST, 143, Budgets(script=True), Ending("preemption"))
    record_event(run, "submitted", job="8", executor="slurm", continues="7")
    later = Attempt("8", 0)
    opened(run, later, nodes=1, script=True)
    usage = ScriptError(last_line="a.py: error: unrecognized arguments: -x", usage=True)
    record_end(run.attempt_logs(Attempt("8", 0)), 0, ScriptEnd(["a.py"], 2, usage), None)
    classification = finalize(run, later, 1, Budgets(script=True))
    assert (classification.cause, classification.decision.restart) == (Cause.CRASH, True)


@pytest.mark.parametrize(
    ("said", "code", "seconds", "cause"),
    [
        ("srun: error: Requested node configuration is not available", 1, 5.0, Cause.BAD_INPUT),
        ("rendezvous: environment variable RANK expected, but not set", 1, 5.0, Cause.BAD_INPUT),
        # The script may have survived the message for long.
        ("srun: error: Requested node configuration is not available", 1, 90.0, Cause.CRASH),
        ("srun: error: Requested node configuration is not available", -9, 5.0, Cause.CRASH),
        ("srun: error: Node failure on n1", 1, 5.0, Cause.CRASH),
    ],
)
def test_what_doctor_calls_hopeless_is_not_started_again(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    said: str,
    code: int,
    seconds: float,
    cause: Cause,
) -> None:
    opened(run, FIRST, nodes=1, script=True)
    ends = time.time() + seconds
    monkeypatch.setattr(time, "time", lambda: ends)
    logs = run.attempt_logs(FIRST)
    record_end(logs, 1, ScriptEnd(["a.sh"], code, ScriptError(last_line="bye")), None)
    (logs / "rank-00001.log").write_text(f"begins\n{said}\nbye\n")
    found = finalize(run, FIRST, 1, Budgets(script=True))
    assert (found.cause, found.decision.restart) == (cause, cause is Cause.CRASH), found.line
    named = find_cause(lines_of_attempt(run, FIRST, State(())))
    assert (named is not None and named.retry == "never") or cause is Cause.CRASH


MISSING = ScriptError("FileNotFoundError", "[Errno 2] No such file: 'a'", "/me/a.py:3")
REFUSED = ScriptError("hpcrun.errors.UserError", "loader: is a list", "/me/a.py:3")


@pytest.mark.parametrize(
    ("error", "seconds", "saved", "cause"),
    [
        (MISSING, 5.0, False, Cause.BAD_INPUT),
        # A file server may be away.
        (MISSING, 90.0, False, Cause.CRASH),
        (MISSING, 5.0, True, Cause.CRASH),
        (ScriptError("SyntaxError", "bad", "/me/a.py:3"), 5.0, False, Cause.BAD_INPUT),
        # hpcrun refuses the same call at any time.
        (REFUSED, 5.0, False, Cause.BAD_INPUT),
        (REFUSED, 9000.0, True, Cause.BAD_INPUT),
        (ScriptError("hpcrun.errors.ClusterError", "no free port"), 5.0, False, Cause.CRASH),
    ],
)
def test_mistakes_of_a_script_count_until_it_works(
    run: RunDirectory,
    monkeypatch: pytest.MonkeyPatch,
    error: ScriptError,
    seconds: float,
    saved: bool,
    cause: Cause,
) -> None:
    opened(run, FIRST, nodes=1, script=True)
    record_event(run, "started", attempt=FIRST)
    if saved:
        record_event(run, "saved", attempt=FIRST, step=7)
    ends = time.time() + seconds
    monkeypatch.setattr(time, "time", lambda: ends)
    record_end(run.attempt_logs(FIRST), 3, ScriptEnd(["a.py"], 1, error), None)
    found = finalize(run, FIRST, 1, Budgets(script=True))
    assert (found.cause, found.decision.restart) == (cause, cause is Cause.CRASH)
    assert error.message in found.line
    assert error.where in found.line


TRACE = 'Traceback (most recent call last):\n  File "/me/a.py", line 3, in <module>\n    run()\n'
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
COMPOSED = "hydra.errors.{}: Error in call to target 'torchvision.datasets.ImageFolder':"


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        # The clean-up of a sound program after a lost network.
        (
            f"{TRACE}torch.distributed.DistNetworkError: The client socket has timed out\n{DURING}"
            f"{TRACE}ValueError: Default process group has not been initialized\n",
            Cause.CRASH,
        ),
        (f"{TRACE}ValueError: Default process group has not been initialized\n", Cause.BAD_INPUT),
        # A wrapper names each exception so.
        (f"{TRACE}{COMPOSED.format('InstantiationException')}\nreset by the server\n", Cause.CRASH),
        (f"{TRACE}{COMPOSED.format('ConfigCompositionException')}\n", Cause.BAD_INPUT),
        # A compiler goes around its cache; then the GPU fails.
        (
            "W0301 10:00:00 codecache.py:9] Can't pickle <lambda>, bypassing\n"
            f"{TRACE}RuntimeError: CUDA error: uncorrectable ECC error encountered\n",
            Cause.CRASH,
        ),
        # A handled mistake, and then an exit without a word.
        ("WARNING: Unexpected key(s) in state_dict: 'head.bias'\n", Cause.CRASH),
        (f"{TRACE}RuntimeError: No backend type associated with device type cpu\n", Cause.CRASH),
        (f"{TRACE}AttributeError: 'NoneType' object has no attribute 'shape'\n", Cause.CRASH),
        (f"{TRACE}OSError: [Errno 122] Disk quota exceeded: 'a.pt'\n", Cause.CRASH),
        (f"{TRACE}RuntimeError: CUDA error: invalid device ordinal\n", Cause.CRASH),
        (f"{TRACE}RuntimeError: The NVIDIA driver on your system is too old\n", Cause.CRASH),
        (f"{TRACE}RuntimeError: CUDA driver version is insufficient for CUDA runtime version\n", Cause.CRASH),
        (f"{TRACE}socket.gaierror: [Errno -3] Temporary failure in name resolution\n", Cause.CRASH),
        (f"{TRACE}OSError: [Errno 28] No space left on device: '/tmp/a'\n", Cause.CRASH),
        (f"{TRACE}OSError: [Errno 116] Stale file handle: '/data/a'\n", Cause.CRASH),
        (f"{TRACE}huggingface_hub.errors.HfHubHTTPError: 503 Server Error: Unavailable\n", Cause.CRASH),
        (f"{TRACE}_pickle.UnpicklingError: pickle data was truncated\n", Cause.CRASH),
        (f"{TRACE}RuntimeError: PytorchStreamReader failed reading zip archive\n", Cause.CRASH),
        ("FlexNet: Licensed number of users already reached\n", Cause.CRASH),
    ],
)  # fmt: skip
def test_a_start_ends_the_run_only_if_another_would_fail(
    run: RunDirectory, log: str, cause: Cause
) -> None:
    opened(run, FIRST, nodes=1, script=True)
    record_event(run, "started", attempt=FIRST)
    logs = run.attempt_logs(FIRST)
    make_log_folder(logs)
    (logs / "rank-00000.log").write_text(f"begins\n{log}")
    end = ScriptEnd(["a.py"], 1, script_error(logs / "rank-00000.log", 1))
    record_end(logs, 0, end, None)
    found = finalize(run, FIRST, 1, Budgets(script=True))
    assert (found.cause, found.decision.restart) == (cause, cause is Cause.CRASH), found.line


def test_a_node_that_fails_at_once_is_left(run: RunDirectory) -> None:
    for attempt in (FIRST, SECOND):
        opened(run, attempt, nodes=1)
        record_event(run, "started", attempt=attempt, step=500)
        failed = Failure(0, "n1", time.time(), "RuntimeError", "CUDA error: unspecified launch failure",
                         "/me/a.py:3", 500, "")  # fmt: skip
        write_failure(run.attempt_logs(attempt), failed)
        found = finalize(run, attempt, 1, Budgets())
        assert found.decision.restart, found.decision.reason


def test_last_words_end_no_run_that_works(run: RunDirectory) -> None:
    opened(run, FIRST, nodes=1)
    for what in ("started", "saved"):
        record_event(run, what, attempt=FIRST, step=500)
    log = "srun: error: n1: task 0: Exited with exit code 1\n"
    make_log_folder(run.attempt_logs(FIRST))
    (run.attempt_logs(FIRST) / "rank-00000.log").write_text(
        f"{TRACE}ValueError: Default process group has not been initialized\n"
    )
    found = finalize(run, FIRST, 1, Budgets(), Ending(log=log))
    assert (found.cause, found.decision.restart) == (Cause.CRASH, True)


@pytest.mark.parametrize(
    ("host", "present", "cause"),
    [("n2", True, Cause.CRASH), ("n2", False, Cause.BAD_INPUT), ("n1", True, Cause.BAD_INPUT)],
)
def test_a_folder_that_another_node_lacks_is_no_mistake(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch, host: str, present: bool, cause: Cause
) -> None:
    monkeypatch.setenv("SLURMD_NODENAME", "n1")
    folder = run.path if present else run.path / "absent"
    opened(run, FIRST)
    error = RunError(f"{folder}: the folder of the submission cannot be entered")
    record_failure(run.attempt_logs(FIRST), 2, error, None, host, bad_input=True)
    assert ended(run, FIRST).cause is cause
