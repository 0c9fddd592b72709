"""iperf3 instead of the built-in sockets, if it is installed."""

import json
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Any

_SLACK = 10.0
# The server of the pair may still be starting.
_TRIES, _PAUSE = 20, 0.25


def installed() -> bool:
    """Return True if iperf3 is on PATH."""
    return shutil.which("iperf3") is not None


def client_command(
    address: str, port: int, seconds: float, streams: int, reverse: bool
) -> list[str]:
    """Build the measurement of one direction; ``reverse``: from the server to the client."""
    command = ["iperf3", "-c", address, "-p", str(port), "-J", "-t", f"{max(1, round(seconds))}"]
    command += ["-P", str(streams), "--connect-timeout", "3000"]
    return [*command, "-R"] if reverse else command


def server_command(port: int) -> list[str]:
    """Build a server for one measurement."""
    return ["iperf3", "-s", "-1", "-p", str(port)]


def parse(text: str) -> dict[str, Any]:
    """Return ``rate`` in bit/s and the fraction of retransmitted segments, or the ``error``.

    iperf3 ends with exit code 0 even if no server listens, so only the text counts.
    """
    try:
        found = json.loads(text)
    except ValueError:
        return {"error": " ".join(text.split())[:200] or "iperf3 printed nothing"}
    if found.get("error"):
        return {"error": str(found["error"])}
    end = found.get("end", {})
    rate = end.get("sum_received", {}).get("bits_per_second")
    if rate is None:
        return {"error": "iperf3 reported no rate"}
    sent = end.get("sum_sent", {})
    # iperf3 counts retransmitted segments, but only the bytes that it sent: an Ethernet segment has 1448
    # bytes.
    segments = (sent.get("bytes") or 0) / 1448
    again = sent.get("retransmits")
    lost = again / segments if again is not None and segments else None
    return {"rate": float(rate), "lost": lost}


def measure(address: str, port: int, seconds: float, streams: int, reverse: bool) -> dict[str, Any]:
    """Measure one direction; try again while the server has not started."""
    command = client_command(address, port, seconds, streams, reverse)
    answer: dict[str, Any] = {"error": "not tried"}
    for _ in range(_TRIES):
        answer = parse(_output(command, seconds + _SLACK))
        if "refused" not in answer.get("error", "") and "busy" not in answer.get("error", ""):
            break
        time.sleep(_PAUSE)
    return answer | {"reverse": reverse}


def serve(port: int, seconds: float) -> None:
    """Serve two measurements, one after the other, for at most ``seconds``."""
    end = time.monotonic() + seconds
    for _ in range(2):
        _output(server_command(port), max(1.0, end - time.monotonic()))


def _output(command: Sequence[str], timeout: float) -> str:
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return json.dumps({"error": f"iperf3 took longer than {timeout:.0f} s"})
    except OSError as error:
        return json.dumps({"error": f"cannot run iperf3: {error.strerror}"})
    return done.stdout or done.stderr
