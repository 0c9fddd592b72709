"""The last message of a script, as PyTorch 2.13's torchrun writes it to a log."""

from pathlib import Path

from hpcrun.diagnose.causes import is_cascade
from hpcrun.diagnose.run_lines import script_exception
from hpcrun.run.endings import Failure

RANK_1 = """\
[rank1]: Traceback (most recent call last):
[rank1]:   File "/home/me/crash.py", line 5, in <module>
[rank1]:     raise ValueError("broken data")
[rank1]: ValueError: broken data
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


def said(folder: Path, text: str) -> tuple[str, str]:
    """Return exception and last line of a log with this text."""
    log = folder / "rank-00000.log"
    log.write_text(text)
    return script_exception(log)


def words(folder: Path, text: str) -> str:
    return said(folder, text)[0]


def test_a_plain_script_ends_with_its_exception_or_last_line(tmp_path: Path) -> None:
    assert said(tmp_path, "epoch 1\nepoch 2\n\n") == ("", "epoch 2")
    assert said(tmp_path, "") == ("", "")
    assert script_exception(tmp_path / "absent") == ("", "")
    # With and without the prefix that torch adds.
    for text in (RANK_1, RANK_1.replace("[rank1]: ", "")):
        assert words(tmp_path, "epoch 1\n" + text) == "ValueError: broken data"
        assert words(tmp_path, text + "wandb: sync finished\n") == "ValueError: broken data"
    # The script handled the error and trained on.
    assert said(tmp_path, RANK_1 + "epoch\n" * 40) == ("", "epoch")


def test_torchruns_report_leads_to_the_rank_that_failed_first(tmp_path: Path) -> None:
    assert words(tmp_path, RANK_1 + RANK_0 + REPORT) == "rank 1: ValueError: broken data"
    # The same message, in any order of the two outputs.
    assert words(tmp_path, RANK_0 + RANK_1 + REPORT) == "rank 1: ValueError: broken data"


def test_a_rank_without_a_process_group_shows_the_last_traceback(tmp_path: Path) -> None:
    text = RANK_1.replace("[rank1]: ", "") + REPORT
    assert words(tmp_path, "loads the data\n" + text) == "rank 1: ValueError: broken data"
    assert words(tmp_path, "loads the data\n" + REPORT) == "rank 1: exit code 1"


def test_a_rank_that_lost_a_remote_peer_is_no_cause(tmp_path: Path) -> None:
    follows = RANK_0.replace("[rank0]", "[rank1]") + REPORT
    told = Failure(1, "n1", 0.0, "ScriptFailed", words(tmp_path, follows), None, None, None)
    assert is_cascade(told)
