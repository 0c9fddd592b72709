"""The last message of a script, as PyTorch 2.13's torchrun writes it to a log."""

from pathlib import Path

import pytest

from hpcrun.ranks.script.end import ScriptEnd
from hpcrun.run.endings import is_cascade
from hpcrun.run.failures.script_log import ScriptError, script_error

RANK_1 = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/crash.py", line 5, in <module>
[rank1]:     raise ValueError("broken data")
[rank1]: ValueError: broken data
"""
TRACE = """\
Traceback (most recent call last):
  File "/home/me/t.py", line 3, in <module>
    start()
  File "/opt/venv/lib/python3.11/site-packages/parts/a.py", line 9, in start
"""
RANK_0 = """\
[rank0]: Traceback (most recent call last):
[rank0]:   File "/home/me/crash.py", line 6, in <module>
[rank0]:     dist.all_reduce(torch.ones(1))
[rank0]:   File "/opt/venv/lib/python3.11/site-packages/torch/distributed/c10d_logger.py", line 83, in wrapper
[rank0]:     return func(*args, **kwargs)
[rank0]:            ^^^^^^^^^^^^^^^^^^^^^
[rank0]:   File "/opt/venv/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce
[rank0]:     work.wait()
[rank0]: RuntimeError: [/pytorch/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:26550. This is typically caused by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF!
"""  # noqa: E501
REPORT = """\
W1122 08:24:25.516000 20353 torch/distributed/elastic/multiprocessing/api.py:1028] Sending process 20936 closing signal SIGTERM
E1122 08:24:25.686000 20353 torch/distributed/elastic/multiprocessing/api.py:1002] failed (exitcode: 1) local_rank: 1 (pid: 20938) of binary: /opt/venv/bin/python
Traceback (most recent call last):
  File "<frozen runpy>", line 198, in _run_module_as_main
torch.distributed.elastic.multiprocessing.errors.ChildFailedError: 
============================================================
crash.py FAILED
------------------------------------------------------------
Failures:
[1]:
  time      : 2026-11-22_08:24:25
  host      : localhost
  rank      : 0 (local_rank: 0)
  exitcode  : -15 (pid: 20936)  (SIGTERM)
  error_file: <N/A>
  traceback : Signal 15 (SIGTERM) received by PID 20936
------------------------------------------------------------
Root Cause (first observed failure):
[0]:
  time      : 2026-11-22_08:24:25
  host      : localhost
  rank      : 1 (local_rank: 1)
  exitcode  : 1 (pid: 20938) 
  error_file: <N/A>
  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html
============================================================
"""  # noqa: E501, W291


def said(folder: Path, text: str, code: int = 1) -> ScriptError:
    """Return the error in a log with this text."""
    log = folder / "rank-00000.log"
    log.write_text(text)
    return script_error(log, code)


def words(folder: Path, text: str) -> tuple[str, str]:
    """Return the exception and its place."""
    error = said(folder, text)
    return error.exception, error.where


BROKEN = ("ValueError: broken data", "/home/me/crash.py:5")


def test_a_plain_script_ends_with_its_exception_or_last_line(tmp_path: Path) -> None:
    assert said(tmp_path, "epoch 1\nepoch 2\n\n") == ScriptError(last_line="epoch 2")
    assert said(tmp_path, "") == script_error(tmp_path / "absent") == ScriptError()
    # With and without the prefix that torch adds.
    for text in (RANK_1, RANK_1.replace("[rank1]: ", "")):
        assert words(tmp_path, "epoch 1\n" + text) == BROKEN
        assert words(tmp_path, text + "wandb: sync finished\n") == BROKEN
    assert said(tmp_path, RANK_1).traceback.splitlines()[-1] == "ValueError: broken data"
    # The script handled the error and trained on.
    assert said(tmp_path, RANK_1 + "epoch\n" * 40) == ScriptError(last_line="epoch")


def test_torchruns_report_leads_to_the_rank_that_failed_first(tmp_path: Path) -> None:
    for text in (RANK_1 + RANK_0, RANK_0 + RANK_1):
        # The same message, in any order of the two outputs.
        assert words(tmp_path, text + REPORT) == BROKEN
    assert (said(tmp_path, RANK_1 + REPORT).rank, said(tmp_path, RANK_1 + REPORT).code) == (1, 1)


def test_a_rank_without_a_process_group_shows_the_last_traceback(tmp_path: Path) -> None:
    text = RANK_1.replace("[rank1]: ", "") + REPORT
    assert words(tmp_path, "loads the data\n" + text) == BROKEN
    assert said(tmp_path, "loads the data\n" + REPORT) == ScriptError(
        last_line="loads the data", rank=1, code=1
    )


def test_a_rank_that_lost_a_remote_peer_is_no_cause(tmp_path: Path) -> None:
    follows = said(tmp_path, RANK_0.replace("[rank0]", "[rank1]") + REPORT)
    assert is_cascade(ScriptEnd(["train.py"], 1, follows).failure(1, None))


MISSING = "ModuleNotFoundError: No module named 'x'"
DURING = "\nDuring handling of the above exception, another exception occurred:\n\n"
ENDED = "ValueError: Default process group has not been initialized"
USAGE = "usage: t.py [-h] --lr LR\nt.py: error: argument --lr: expected one argument\n"


@pytest.mark.parametrize(
    ("text", "code", "mistake"),
    [
        (f"{TRACE}{MISSING}\n", 1, True),
        (f"{TRACE}FileNotFoundError: [Errno 2] No such file or directory: 'data.bin'\n", 1, True),
        (f"{TRACE}FileNotFoundError: [Errno 2] No such file or directory: '/dev/nvidia0'\n", 1, False),
        (f"{TRACE}ImportError: libcudart.so.12: cannot open shared object file\n", 1, False),
        (f"{TRACE}AssertionError: Torch not compiled with CUDA enabled\n", 1, True),
        (f"{TRACE}OSError: [Errno 122] Disk quota exceeded: 'a.pt'\n", 1, False),
        (f"{TRACE}ImportError: /me/.cache/torch_extensions/a.so: file too short\n", 1, False),
        (f"{TRACE}SyntaxError: source code string cannot contain null bytes\n", 1, False),
        (f"{TRACE}FileNotFoundError: [Errno 2] No such file or directory: 'nvidia-smi'\n", 1, False),
        (f"{TRACE}FileNotFoundError: [Errno 2] No such file: '/me/.triton/cache/k.tmp.pid_7'\n", 1, False),
        (f"{TRACE}PermissionError: [Errno 13] Permission denied\n", 1, False),
        (f"{TRACE}AttributeError: 'NoneType' object has no attribute 'shape'\n", 1, False),
        (f"{TRACE}AttributeError: 'Net' object has no attribute 'shape'\n", 1, True),
        (f"{TRACE}NameError: name 'connection' is not defined\n", 1, True),
        (f"{TRACE}requests.exceptions.ConnectionError: read timed out\n{DURING}{TRACE}{MISSING}\n", 1, False),
        (f"{TRACE}RuntimeError: NCCL error: unhandled system error\n{DURING}{TRACE}{ENDED}\n", 1, False),
        (f"{TRACE}torch.distributed.DistStoreError: Timed out\n{DURING}{TRACE}NameError: m\n", 1, False),
        (f"{TRACE}KeyError: 3\n{DURING}{TRACE}{MISSING}\n", 1, True),
        ("[WARNING] Unexpected key(s) in state_dict: 'a'\n", 1, False),
        ("bash: /x/solver: /bin/sh: bad interpreter: Text file busy\n", 126, False),
        (f"{TRACE}OSError: [Errno 5] Input/output error: 'a.pt'\n", 1, False),
        (f"{TRACE}hpcrun.errors.NotTrainable: the loss has no gradient\n", 1, True),
        (f"{TRACE}hpcrun.errors.ClusterError: no free port\n", 1, False),
        (f"{TRACE}RuntimeError: CUDA error: unspecified launch failure\n", 1, False),
        (f"{TRACE}ValueError: sample 7 is broken\n", 1, False),
        ('  File "t.py", line 3\n    for x in\n           ^\nSyntaxError: invalid syntax\n', 1, True),
        (USAGE, 2, True),
        ("Usage: t.py [OPTIONS]\n\nError: No such option: --lrr\n", 2, True),
        ("t.py: no such speed\n", 2, False),
        ("python: can't open file '/a/t.py': [Errno 13] Permission denied\n", 2, True),
        ("python: can't open file '/a/t.py': [Errno 2] No such file or directory\n", 2, True),
        ("run.sh: line 3: trainn: command not found\n", 127, True),
        ("sh: 1: ./solver: Permission denied\n", 126, True),
        ("solver: error while loading shared libraries: libcuda.so.1: cannot open\n", 127, False),
        ("Killed\n", 137, False),
    ],
)  # fmt: skip
def test_only_mistakes_at_the_start_would_repeat(
    tmp_path: Path, text: str, code: int, mistake: bool
) -> None:
    end = ScriptEnd(["t.py"], code, said(tmp_path, text, code))
    assert end.failure(0, None).bad_input is mistake
    # After a step the same words may come from a node or a file server.
    assert end.failure(0, 7).bad_input is end.failure(0, 7).certain is ("NotTrainable" in text)
    # The same under torchrun, which ends with code 1 itself.
    report = REPORT.replace("exitcode  : 1 ", f"exitcode  : {code} ")
    if code < 128:
        again = ScriptEnd(["t.py"], 1, said(tmp_path, text + report))
        assert again.failure(0, None).bad_input is mistake


def test_a_launchers_traceback_is_not_that_of_its_program(tmp_path: Path) -> None:
    launcher = (
        'Traceback (most recent call last):\n  File "<frozen runpy>", line 198, in _run\n'
        "subprocess.CalledProcessError: Command '['t.py']' returned non-zero exit status 1.\n"
    )
    assert words(tmp_path, f"{TRACE}{MISSING}\n{launcher}") == (MISSING, "/home/me/t.py:3")
