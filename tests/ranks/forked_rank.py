"""A rank for the tests of the fork server: it starts as hpcrun.worker does, and then does what its words say.

facts           print this process's state as JSON
offer           offer this process's state to the server
exit CODE       exit with a code
die NUMBER      die of a signal
wait            print the process's number, wait for a signal to stop, print the reason
helper          print the numbers of this process and of a process that it starts, and wait
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

from hpcrun.ranks import fork_client
from hpcrun.ranks.fork_messages import TEMPLATE
from hpcrun.ranks.fork_template import wait_for_ranks
from hpcrun.ranks.signals import STOP
from hpcrun.run import record

_FORK_OF = os.getpid()
_PER_PROCESS = ("Name", "SigBlk", "SigIgn", "SigCgt", "NoNewPrivs", "Cpus_allowed_list")


def imports() -> None:
    """Import NumPy, whose library for linear algebra starts threads."""
    import multiprocessing
    import uuid

    import numpy

    numpy.ones((300, 300)) @ numpy.ones((300, 300))
    multiprocessing.current_process()
    uuid.uuid4()
    os.environ["SET_AT_IMPORT"] = "yes"
    if "THREAD_AT_IMPORT" in os.environ:
        threading.Thread(target=signal.pause, daemon=True).start()


def main() -> None:
    """Start as hpcrun.worker does."""
    if TEMPLATE in os.environ:
        wait_for_ranks(imports, lambda: os.environ.get("HPCRUN_TEST_THREADS", "1"))
    else:
        STOP.install()
        fork_client.become_forked()
        imports()
    STOP.install()
    STOP.take_interrupt()
    act(*sys.argv[1:])


def act(word: str, number: str = "0") -> None:
    """Do what the words say."""
    if word == "facts":
        print(json.dumps({"same": same(), "own": own(), "forked": os.getpid() != _FORK_OF}))
    elif word == "offer":
        fork_client.offer_own_state("1")
    elif word == "exit":
        print(os.getpid())
        sys.exit(int(number))
    elif word == "die":
        print(os.getpid(), flush=True)
        signal.signal(int(number), signal.SIG_DFL) if int(number) != signal.SIGKILL else None
        os.kill(os.getpid(), int(number))
    elif word == "wait":
        print(os.getpid(), flush=True)
        # Not sigwait: the handler must run.
        while not STOP.reason:
            signal.sigtimedwait([], 0.01)
        print(STOP.reason.name, flush=True)
    elif word == "helper":
        helper = subprocess.Popen(["sleep", "1000"])
        print(os.getpid(), helper.pid, flush=True)
        signal.pause()


def same() -> dict[str, object]:
    """Return what a forked rank must have like a fresh process."""
    status = Path("/proc/self/status").read_text().splitlines()
    names = (line.partition(":")[::2] for line in status)
    links = {int(path.name): path for path in Path("/proc/self/fd").iterdir()}
    return {
        "status": {name: text for name, text in names if name in _PER_PROCESS},
        "descriptors": sorted(number for number, path in links.items() if path.exists()),
        "environ": dict(os.environ),
        "argv": sys.argv,
        "orig_argv": sys.orig_argv[1:],
        "path": sys.path,
        "folder": str(Path.cwd()),
        "cpus": sorted(os.sched_getaffinity(0)),
        "umask": os.umask(0),
        "limits": [resource.getrlimit(number) for number in range(16)],
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "unbuffered": sys.stdout.write_through,
        "input": sys.stdin.read(),
        "handlers": [str(signal.getsignal(number)).split(" at ")[0] for number in range(1, 32)],
        "temporary": tempfile.gettempdir(),
    }


def own() -> list[str]:
    """Return what every process must have for itself."""
    import multiprocessing

    import numpy

    return [
        record.INCARNATION,
        str(random.random()),
        str(numpy.random.rand()),
        bytes(multiprocessing.current_process().authkey).hex(),
        tempfile.mktemp(),
        str(os.getpgid(0)),
    ]


if __name__ == "__main__":
    main()
