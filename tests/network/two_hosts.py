"""Two hosts of this machine, each a network namespace, with two links between them."""

import contextlib
import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import jobs

LINKS = ("link0", "link1")
HOSTS = ("10.77.0.1", "10.77.0.2")
"""The address of each host on ``link0``."""


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True)


def up(host: str, link: str) -> bool:
    """Return True if the kernel has noticed the carrier of the link."""
    words = ["ip", "-n", host, "-brief", "link", "show", link]
    return " UP " in subprocess.run(words, check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def two_hosts(rates: tuple[str | None, str | None]) -> Iterator[list[list[str]]]:
    """Give the words before a command on each host. The name of a host leads to its ``link0``.

    Args:
        rates: the rate of each link in tc's form (``40mbit``); None: unlimited.
    """
    if os.geteuid() != 0 or not all(map(shutil.which, ("ip", "tc"))):
        pytest.skip("network namespaces need root, ip and tc")
    names = [f"hpcrun-{os.getpid()}-{host}" for host in "ab"]
    folders = [Path("/etc/netns") / name for name in names]
    try:
        for number, name in enumerate(names, 1):
            run("ip", "netns", "add", name)
            run("ip", "-n", name, "link", "set", "lo", "up")
            # `ip netns exec` puts these files over those in /etc.
            (folder := folders[number - 1]).mkdir(parents=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n10.77.0.{number} {socket.gethostname()}\n"
            )
        for link, (label, rate) in enumerate(zip(LINKS, rates, strict=True)):
            peer = ("peer", "name", label, "netns", names[1])
            run("ip", "link", "add", label, "netns", names[0], "type", "veth", *peer)
            for number, name in enumerate(names, 1):
                run("ip", "-n", name, "address", "add", f"10.77.{link}.{number}/24", "dev", label)
                run("ip", "-n", name, "link", "set", label, "up")
                if rate:
                    limit = ("rate", rate, "burst", "64kb", "latency", "100ms")
                    run("tc", "-n", name, "qdisc", "add", "dev", label, "root", "tbf", *limit)
        jobs.wait_for(lambda: all(up(name, label) for name in names for label in LINKS))
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name, folder in zip(names, folders, strict=True):
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)
