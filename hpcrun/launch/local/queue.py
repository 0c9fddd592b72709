"""The queue of the local cluster: starts the jobs of a sweep one after the other, some at a time.

Each job gets a controller of its own when its turn comes, so that it is canceled, preempted and started
again like every job. Until then its state is PENDING, under the pid of the queue. Run as ``python -m
hpcrun.launch.local.queue FILE``, in a session of its own.
"""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrun.cluster.environment import scrub
from hpcrun.launch.errors import LaunchError
from hpcrun.launch.local.controller import tell
from hpcrun.launch.local.job_files import (
    JobRequest,
    is_withdrawn,
    own_status,
    read_status,
    write_status,
)
from hpcrun.run.io.files import read_json

_TICK = 0.1


class Queue:
    """The jobs that wait and those that run, each in a slot with its own GPUs."""

    def __init__(self, waiting: Sequence[JobRequest], at_once: int, devices: Sequence[str]) -> None:
        self._waiting = list(waiting)
        self._devices = list(devices)
        self._slots: dict[int, tuple[JobRequest, subprocess.Popen[bytes]]] = {}
        self._at_once = at_once
        self.stopping = False

    def run(self) -> None:
        """Run until no job is left; after ``stopping`` no further job begins."""
        for request in self._waiting:
            write_status(Path(request.folder), own_status(request, "PENDING", 0, [], queued=True))
        while self._waiting or self._slots:
            # A full disk or a busy process table may pass: the next look tries again.
            with contextlib.suppress(OSError):
                self._free_slots()
                self._drop_withdrawn()
                while self._waiting and len(self._slots) < self._at_once:
                    self._start(self._waiting[0])
                    self._waiting.pop(0)
            time.sleep(_TICK)

    def _free_slots(self) -> None:
        for slot, (request, controller) in list(self._slots.items()):
            if controller.poll() is None:
                continue
            del self._slots[slot]
            status = read_status(Path(request.folder))
            if status is not None and status.queued:
                # The controller did not begin; its log says why.
                tell(request, "FAILED", 0)

    def _drop_withdrawn(self) -> None:
        gone = [one for one in self._waiting if self.stopping or is_withdrawn(Path(one.folder))]
        for request in gone:
            self._waiting.remove(request)
            tell(request, "CANCELLED", 0)

    def _start(self, request: JobRequest) -> None:
        if not Path(request.folder).is_dir():
            # Somebody has deleted the run.
            return
        slot = next(number for number in range(self._at_once) if number not in self._slots)
        mine = replace(request, devices=self._devices_of(slot, request))
        mine.write()
        with (Path(request.folder) / "controller.log").open("ab") as log:
            controller = subprocess.Popen(
                [sys.executable, "-m", "hpcrun.launch.local.controller", str(mine.path)],
                env=scrub(os.environ),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._slots[slot] = mine, controller

    def _devices_of(self, slot: int, request: JobRequest) -> Sequence[str] | None:
        """Return the GPUs of a slot; slots share them where there are more slots than GPUs."""
        if request.devices is None or not self._devices:
            return request.devices
        wanted = len(request.devices)
        first = slot * wanted
        return [self._devices[(first + number) % len(self._devices)] for number in range(wanted)]


def main(arguments: Sequence[str]) -> None:
    """Run the jobs that the file ``arguments[0]`` lists."""
    content: dict[str, Any] | None = read_json(Path(arguments[0]))
    if content is None:
        raise LaunchError(f"{arguments[0]}: no list of jobs; submit the sweep again")
    jobs = [JobRequest(**job) for job in content["jobs"]]
    queue = Queue(jobs, int(content["at_once"]), content["devices"])

    def stop(_number: int, _frame: object) -> None:
        queue.stopping = True

    signal.signal(signal.SIGTERM, stop)
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    queue.run()


if __name__ == "__main__":
    main(sys.argv[1:])
