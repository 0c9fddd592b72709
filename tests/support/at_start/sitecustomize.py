"""Lets a fork with torch run in place of a Python program; see ``tests/support/start_server.py``.

Python imports this module at each start: ``tests/conftest.py`` puts its folder on PYTHONPATH.
"""

import os
import select
import signal
import socket
import sys
from contextlib import suppress

_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGCONT),
)


def kind_of(words):
    """Return which server has the modules of a program: of ranks and scripts with torch, or of commands.

    Slurm signals all processes of a step, but it does not know the children of a fork. So a program that
    starts ranks or scripts runs itself: torchrun in a job, mp.spawn, and the worker of a script.
    """
    local = not os.environ.get("SLURM_JOB_ID")
    if "TORCHELASTIC_RUN_ID" in os.environ:
        # A rank names its job by torchrun, its parent.
        return None
    while words[:1] in (["-u"], ["-B"]):
        words = words[1:]
    if words[:2] == ["-m", "hpcrun.job.opening"] or words[:3] == ["-m", "hpcrun", "finalize"]:
        # The controller of the local cluster runs both around each attempt.
        return "commands"
    if words[:2] == ["-m", "hpcrun"]:
        # Only where the caller needs no process group: a key on a terminal reaches a whole group.
        return "commands" if os.environ.get("HPCRUN_TEST_COMMANDS") else None
    if words[:2] == ["-m", "hpcrun.estimate"] or (
        local and words[:2] == ["-m", "torch.distributed.run"]
    ):
        return "torch"
    if words[:2] == ["-m", "hpcrun.worker"]:
        # A template of hpcrun's own fork server must start by itself.
        loop = "\ncommand: []\n" in text_of(f"{words[-1]}/config.yaml")
        return "torch" if loop and "HPCRUN_FORK_TEMPLATE" not in os.environ else None
    script = text_of(words[0]) if words and words[0].endswith(".py") else ""
    imports = "\nimport torch\n" in script and not ("spawn" in script or "subprocess" in script)
    return "torch" if imports else None


def text_of(path):
    """Return the text of a file; empty if that is impossible."""
    with suppress(OSError, ValueError), open(path, encoding="utf-8") as file:  # noqa: PTH123
        return file.read()
    return ""


def ask(address):
    """Let a fork of the server run in place of this process; return if the server refuses.

    This process passes signals on and ends as the fork does. The server kills the fork when this process
    has ended.
    """
    from hpcrun.ranks.fork_messages import BadMessage, Inbox, send
    from hpcrun.ranks.process_state import own_state

    state = own_state()
    connection = socket.socket(socket.AF_UNIX)
    inbox, (readable, writable) = Inbox(connection), os.pipe()
    os.set_blocking(writable, False)
    forwarded = set(_FORWARDED) - set(state.ignored)
    before = {number: signal.getsignal(number) for number in forwarded}
    try:
        connection.connect(address)
        signal.set_wakeup_fd(writable, warn_on_full_buffer=False)
        for number in forwarded:
            signal.signal(number, lambda *_: None)
        send(connection, state, range(3))
        answer = inbox.wait()
        if "process" in answer:
            follow(inbox, connection.fileno(), answer["process"], readable)
    except (OSError, EOFError, BadMessage):
        pass
    signal.set_wakeup_fd(-1)
    for number, handler in before.items():
        signal.signal(number, handler)
    inbox.close()
    os.close(readable)
    os.close(writable)


def follow(inbox, connection, process, signals):
    """Pass signals on to the process, and end as the process ends."""
    from hpcrun.ranks.fork_client import end_as

    waiting = select.poll()
    waiting.register(connection, select.POLLIN)
    waiting.register(signals, select.POLLIN)
    status = int(signal.SIGKILL)
    with suppress(EOFError, OSError):
        message = None
        while message is None:
            for descriptor, _ in waiting.poll():
                if descriptor == connection:
                    message = inbox.receive()
                    continue
                for received in os.read(signals, 4096):
                    with suppress(ProcessLookupError):
                        os.kill(process, received)
        status = message["status"]
    end_as(status)


if (folder := os.environ.get("HPCRUN_TEST_START")) and (kind := kind_of(sys.orig_argv[1:])):
    ask(f"{folder}/{kind}")
