"""The server of `hpcrun report --serve`: the page for this user only, renewed while runs train."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from hmac import compare_digest
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hpcrun.errors import UserError, one_line
from hpcrun.printing import say_aside
from hpcrun.results.report.content import Content
from hpcrun.results.report.page import main_part, moment, whole_page

_HOST = "127.0.0.1"
_OWN_NAME = re.compile(rf"({re.escape(_HOST)}|localhost)(:[0-9]{{1,5}})?", re.IGNORECASE)
_MOST_OPEN = 64
"""Connections at a time: any user of the host can open some and send nothing."""
_SECONDS = 10
"""The least time between two readings of the runs, and the time between two questions of a browser."""


class ReportServer(ThreadingHTTPServer):
    """The page of some runs, under a path with a random token that other users of the host do not know."""

    daemon_threads = True
    # With the default of 5, the kernel lets the user wait for seconds behind silent connections.
    request_queue_size = 128

    def __init__(self, read: Callable[[], Content], port: int = 0, pause: float = _SECONDS) -> None:
        """Read the runs and listen.

        Args:
            read: reads the runs.
            port: 0 is any free port.
            pause: seconds during which a reading serves all requests.

        Raises:
            UserError: the port is not free, or the runs cannot be read.
        """
        self._read, self._pause, self._lock = read, pause, threading.Lock()
        self._content, self._at = read(), time.monotonic()
        self._open = deque[socket.socket]()
        self.token = secrets.token_urlsafe(18)
        try:
            super().__init__((_HOST, port), _Handler)
        except OSError as error:
            raise UserError(f"--port {port}: {error.strerror}; omit it for a free port") from None

    @property
    def url(self) -> str:
        """The address of the page."""
        return f"http://{_HOST}:{self.server_port}/{self.token}/"

    def forward_line(self) -> str | None:
        """Return the ssh command that makes the address work on the user's computer; None without ssh."""
        if not os.environ.get("SSH_CONNECTION"):
            return None
        name = socket.getfqdn()
        host = socket.gethostname() if name.startswith("localhost") else name
        return f"ssh -N -L {self.server_port}:{_HOST}:{self.server_port} {host}"

    def page(self, *, whole: bool) -> tuple[str, str]:
        """Return the page or its main part, and the time at which the runs were read.

        Raises:
            UserError: the runs cannot be read.
            OSError: the disk refused.
        """
        with self._lock:
            if time.monotonic() - self._at >= self._pause:
                self._content, self._at = self._read(), time.monotonic()
            content = self._content
        main = main_part(content)
        text = whole_page(content, main, live=_SECONDS) if whole else main
        return text, moment(content.read) or "unknown"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a request in a new thread, and end the oldest connections if there are too many."""
        self._open.append(request)
        while len(self._open) > _MOST_OPEN:
            with contextlib.suppress(OSError, IndexError):
                self._open.popleft().shutdown(socket.SHUT_RDWR)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """End a connection."""
        with contextlib.suppress(ValueError):
            self._open.remove(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print a line for an error of this server; a client that went away is none."""
        error = sys.exc_info()[1]
        if isinstance(error, Exception) and not isinstance(error, OSError):
            say_aside(f"hpcrun: report: a request was not answered: {one_line(error)}")


class _Handler(BaseHTTPRequestHandler):
    server: ReportServer
    timeout = _SECONDS
    server_version, sys_version = "hpcrun", ""

    def do_GET(self) -> None:
        """Answer with the page, its main part, or a refusal."""
        # A page of another site may point its own name at this host (DNS rebinding).
        hosts = self.headers.get_all("Host", [])
        token, _, name = self.path.lstrip("/").partition("/")
        if len(hosts) != 1 or not _OWN_NAME.fullmatch(hosts[0].strip()):
            self._send(403, "open the address with 127.0.0.1 or localhost")
        elif not compare_digest(token.encode(), self.server.token.encode()):
            self._send(403, "wrong token; use the address that hpcrun printed")
        elif name not in ("", "main"):
            self._send(404, "no such page; use the address that hpcrun printed")
        else:
            try:
                self._send(200, *self.server.page(whole=not name), kind="html")
            except (UserError, OSError) as error:
                self._send(503, str(error))

    def _send(self, code: int, text: str, read: str = "", kind: str = "plain") -> None:
        body = text.encode()
        self.send_response(code)
        for name, value in {
            "Content-Type": f"text/{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "X-Read": read,
        }.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing: the requests are those of the user."""
