"""The queue of the local cluster: starts the jobs of a sweep in order, a limited number at a time.

Each job gets a separate controller when its turn comes, so that it can be cancelled, preempted and started
again like every job. Until then its state is PENDING, under the pid of the queue. Run as ``python -m
hpcrun.slurm.local.queue FILE``, in a new session.
"""

import contextlib
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hpcrun.errors import LaunchError
from hpcrun.run.trust import own_json
from hpcrun.slurm.local.controller import tell
from hpcrun.slurm.local.job_files import (
    JobRequest,
    QueueLimits,
    is_withdrawn,
    own_status,
    read_status,
    release,
    released,
    start_controller,
    write_status,
)

_TICK = 0.2


class Queue:
    """The jobs that wait and those that run, each with GPUs.

    ``stopping``: no further job begins.
    """

    def __init__(self, waiting: Sequence[JobRequest], limits: QueueLimits) -> None:
        self._waiting = deque(waiting)
        self._limits = limits
        self._running: list[tuple[JobRequest, subprocess.Popen[bytes]]] = []
        self.stopping = False
        self._released: bool | None = None

    def run(self) -> None:
        """Run until no job is left."""
        for request in self._waiting:
            write_status(Path(request.folder), own_status(request, "PENDING", 0, [], queued=True))
        while self._waiting or self._running:
            # A full disk or a full process table may be temporary: the next round tries again.
            with contextlib.suppress(OSError):
                self._reap()
                if self._released is None:
                    self._released = released(0.0)
                    self.stopping |= self._released is False
                self._drop_withdrawn()
                while self._released and self._waiting and self._has_room(self._waiting[0]):
                    self._start(self._waiting[0])
                    self._waiting.popleft()
            time.sleep(_TICK)

    def _reap(self) -> None:
        running, self._running = self._running, []
        for request, controller in running:
            if controller.poll() is None:
                self._running.append((request, controller))
                continue
            status = read_status(Path(request.folder))
            if status is not None and status.queued:
                # The controller did not begin; its log says why.
                tell(request, "FAILED", 0)

    def _drop_withdrawn(self) -> None:
        """Cancel the waiting jobs that a person has cancelled."""
        waiting, self._waiting = self._waiting, deque[JobRequest]()
        for request in waiting:
            if self.stopping or is_withdrawn(Path(request.folder)):
                tell(request, "CANCELLED", 0)
            else:
                self._waiting.append(request)

    def _start(self, request: JobRequest) -> None:
        if not Path(request.folder).is_dir():
            # Somebody has deleted the run.
            return
        devices = request.devices and self._free()[: len(request.devices)]
        mine = replace(request, devices=devices)
        controller = start_controller(mine)
        self._running.append((mine, controller))
        with contextlib.suppress(LaunchError):
            # If the controller has ended, the next round records it.
            release(controller)

    def _has_room(self, request: JobRequest) -> bool:
        if len(self._running) >= self._limits.at_once:
            return False
        return len(self._free()) >= len(request.devices or ())

    def _free(self) -> list[str]:
        """Return the GPUs without a job."""
        used = {device for request, _ in self._running for device in request.devices or ()}
        return [device for device in self._limits.devices if device not in used]


def main(arguments: Sequence[str]) -> None:
    """Run the jobs that the file ``arguments[0]`` lists."""
    content: dict[str, Any] | None = own_json(Path(arguments[0]))
    if content is None:
        raise LaunchError(f"{arguments[0]}: is not a list of jobs; submit the sweep again")
    jobs = [JobRequest(**job) for job in content["jobs"]]
    queue = Queue(jobs, QueueLimits(**content["limits"]))

    def stop(_number: int, _frame: object) -> None:
        queue.stopping = True

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, lambda *_: None)
    queue.run()


if __name__ == "__main__":
    main(sys.argv[1:])
