"""Ports for the servers that tests start."""

import secrets

from hpcrun.ranks.addresses import is_free, port_candidates


def free_port() -> int:
    """Return a TCP port of loopback without a listener.

    The port is outside the kernel's ephemeral range: otherwise another test's connection could get
    it before its use.
    """
    candidates = port_candidates(str(secrets.randbelow(2**26)))
    return next(port for port in candidates if is_free("127.0.0.1", port))
