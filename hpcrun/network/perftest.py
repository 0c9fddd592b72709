"""RDMA between two nodes with ``ib_write_bw`` of perftest: its command line, its output, its processes.

Source of the format: RESULT_FMT_G and REPORT_FMT in src/perftest_parameters.h of
https://github.com/linux-rdma/perftest.
"""

import re
import shutil
import socket
import subprocess
import time
from pathlib import Path
from typing import Any

from hpcrun.network.nccl.machine import RdmaPort, read_rdma
from hpcrun.slurm import run

PROGRAM = "ib_write_bw"
EXTRA = 20.0
"""Seconds that a measurement may take in addition: the connection, and the memory of the buffers."""
_START, _PAUSE = 0.3, 0.5
_NOT_YET = "Couldn't connect"
_UNITS = {"Gb/sec": 1e9, "MiB/sec": 8 * 2**20, "MB/sec": 8 * 2**20}
_HEADER = re.compile(r"#bytes\s+#iterations\s+BW peak\[[^\]]+\]\s+BW average\[(?P<unit>[^\]]+)\]")


def ib_write_bw_command(
    port: RdmaPort, tcp_port: int, seconds: int, server: str | None = None
) -> list[str]:
    """Build the command line of one end.

    Args:
        port: the port of the RDMA device.
        tcp_port: through which the two ends exchange their addresses.
        seconds: the duration; the same at both ends.
        server: address of the end that receives; None: this end is the server.
    """
    options = ["--ib-dev", port.device, "--ib-port", str(port.port), "--port", str(tcp_port)]
    options += ["--duration", str(seconds), "--report_gbits", "--CPU-freq"]
    return [PROGRAM, *options, *([server] if server else [])]


def parse_ib_write_bw(text: str) -> float | None:
    """Return the average bandwidth in bit/s from the client's report; None without a result."""
    header = _HEADER.search(text)
    if header is None or header["unit"] not in _UNITS:
        return None
    for line in text[header.end() :].splitlines()[1:]:
        words = line.split()
        if len(words) >= 4 and words[0].isdecimal():
            try:
                return float(words[3]) * _UNITS[header["unit"]]
            except ValueError:
                return None
    return None


def problem_of(output: str) -> str:
    """Return the last line of an error message of perftest."""
    lines = [" ".join(line.split()) for line in output.splitlines()]
    return next((line for line in reversed(lines) if line), "no result")


def chosen_port(root: Path = Path("/")) -> RdmaPort | str:
    """Return the port to measure, or why none can be measured: InfiniBand before Ethernet, the fastest first.

    Args:
        root: folder with /sys and /dev.
    """
    ports = read_rdma(root)
    if not ports:
        return "no RDMA device"
    usable = [one for one in ports if one.active and one.driver != "efa"]
    if not usable:
        return "no active port of an RDMA device that supports ib_write_bw"
    if shutil.which(PROGRAM) is None:
        return f"{PROGRAM} is not installed (package perftest)"
    return max(usable, key=lambda one: (one.layer == "InfiniBand", one.rate or 0))


class Perftest:
    """This node as one end of a measurement.

    Args:
        root: folder with /sys; tests use another folder.
    """

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._server: subprocess.Popen[bytes] | None = None

    def facts(self) -> dict[str, str | None]:
        """Return the device that is measured, or the obstacle."""
        port = chosen_port(self._root)
        if isinstance(port, str):
            return {"device": None, "obstacle": port}
        return {"device": f"{port.device}:{port.port}", "obstacle": None}

    def serve(self, seconds: int) -> dict[str, Any]:
        """Start the end that receives; return its TCP port, or the problem."""
        self.close()
        port = chosen_port(self._root)
        if isinstance(port, str):
            return {"problem": port}
        with socket.create_server(("", 0)) as free:
            tcp_port = free.getsockname()[1]
        self._server = subprocess.Popen(
            ib_write_bw_command(port, tcp_port, seconds),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )
        # A server that cannot use its device ends within milliseconds.
        time.sleep(_START)
        if self._server.poll():
            words = self._server.communicate()[1]
            self._server = None
            return {"problem": problem_of(words.decode(errors="replace"))}
        return {"port": tcp_port}

    def measure(self, address: str, tcp_port: int, seconds: int) -> dict[str, Any]:
        """Send to the server at ``address``; return ``bits_per_second``, or the problem."""
        port = chosen_port(self._root)
        if isinstance(port, str):
            return {"problem": port}
        command = ib_write_bw_command(port, tcp_port, seconds, address)
        end = time.monotonic() + seconds + EXTRA
        while True:
            done = run(command, timeout=max(1.0, end - time.monotonic()))
            rate = parse_ib_write_bw(done.stdout) if done.returncode == 0 else None
            if rate is not None:
                return {"bits_per_second": rate}
            left = end - time.monotonic() - seconds
            if _NOT_YET not in done.stderr or left < EXTRA / 2:
                return {"problem": problem_of(done.stderr)}
            time.sleep(_PAUSE)

    def close(self) -> None:
        """End a server that still waits for its client."""
        if self._server is not None:
            self._server.kill()
            self._server.communicate()
        self._server = None
