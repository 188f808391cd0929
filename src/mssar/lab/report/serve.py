"""The page on this machine's own address, looking again whenever a file changes."""

from __future__ import annotations

import hashlib
import io
import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

from mssar.lab.report.collect import below
from mssar.lab.report.content import Page
from mssar.lab.report.page import html, news, policy

ADDRESS = "127.0.0.1"
# A port that is forwarded has another number here, and port 80 is not said at all.
OURS = re.compile(r"(localhost|127\.0\.0\.1)(:\d{1,5})?", re.IGNORECASE | re.ASCII)
HEAD, END = 1 << 14, b"\r\n\r\n"  # bytes of a request, and its last
READING, SENDING = 5.0, 60.0  # seconds for a request, and for its answer
AT_ONCE = 32  # requests
PROTECTION = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Source:
    """The page of some places as they are now. What did not change is not made again."""

    def __init__(self, places: Sequence[Path], make: Callable[[], Page]) -> None:
        self.places, self.make = places, make
        self._lock = threading.Lock()
        self._state: object = None
        self._page, self._news = "", ""

    def page(self) -> str:
        with self._lock:
            self._look()
            return self._page

    def news(self) -> str:
        with self._lock:
            self._look()
            return self._news

    def _look(self) -> None:
        state = _state(self.places)
        if state != self._state:
            made = self.make()
            self._page, self._news = html(made), news(made)
            self._state = state


def _state(places: Iterable[Path]) -> tuple[object, ...]:
    """Names, sizes and times of the files that a page is made of."""
    found: list[object] = []
    for place in places:
        for file in below(place) if place.is_dir() else [place]:
            try:
                state = file.stat()
            except OSError:  # replaced just now
                continue
            found.append((str(file), state.st_size, state.st_mtime_ns))
    return tuple(found)


class _Handler(BaseHTTPRequestHandler):
    server: Server
    timeout = SENDING
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"
    asked = ""  # the path, once there is one

    def handle(self) -> None:
        with suppress(ConnectionError, TimeoutError):  # a tab that was closed, or that sleeps
            head = self._head()
            self.rfile = io.BytesIO(head)
            if len(head) > HEAD:
                self.requestline, self.request_version, self.command = "", "HTTP/1.0", ""
                self.send_error(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)
                return
            super().handle()

    def _head(self) -> bytes:
        """The request up to its empty line; nothing, if it ends before. What comes after it is
        never looked at."""
        until, head = time.monotonic() + READING, b""
        while END not in head and len(head) <= HEAD:
            self.connection.settimeout(max(until - time.monotonic(), 0.001))
            piece = self.connection.recv(1 << 12)
            if not piece:
                return b""
            head += piece
        self.connection.settimeout(SENDING)
        return head[: head.index(END) + len(END)] if END in head else head

    def do_GET(self) -> None:
        self.asked = self.path.partition("?")[0]
        kinds = {
            "/": ("text/html; charset=utf-8", self.server.source.page),
            "/data.json": ("application/json", self.server.source.news),
        }
        if not self._is_for_us():
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine alone")
            return
        if self.asked not in kinds:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, make = kinds[self.asked]
        body = make().encode()
        tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
        if self.headers.get("If-None-Match") == tag:
            self.send_response(HTTPStatus.NOT_MODIFIED)
            self.send_header("ETag", tag)
            self.end_headers()
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("ETag", tag)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815, its name there

    def end_headers(self) -> None:
        """With every answer, errors too."""
        page = self.asked == "/"
        allowed = policy(live=True) if page else "default-src 'none'; sandbox"
        for name, value in PROTECTION.items():
            self.send_header(name, value)
        self.send_header("Content-Security-Policy", f"{allowed}; frame-ancestors 'none'")
        super().end_headers()

    def _is_for_us(self) -> bool:
        """Not a page elsewhere whose name was made to point here, nor one that asks from there."""
        named = self.headers.get_all("Host", [])
        if len(named) != 1 or not OURS.fullmatch(named[0]):
            return False
        origin = self.headers.get("Origin")
        if origin not in (None, f"http://{named[0]}"):
            return False
        # Browsers say who asks. Another site may link to the page, but not read or embed it.
        asks, how = (self.headers.get(f"Sec-Fetch-{what}") for what in ("Site", "Mode"))
        return asks in (None, "same-origin", "none") or (how == "navigate" and self.asked == "/")

    def version_string(self) -> str:
        return "mssar"

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, its name there
        """Requests are not news."""


class Server(ThreadingHTTPServer):
    """Serves one page until it is shut down."""

    daemon_threads = True
    request_queue_size = AT_ONCE

    def __init__(self, source: Source, port: int = 0) -> None:
        self.source = source
        self._free = threading.BoundedSemaphore(AT_ONCE)
        super().__init__((ADDRESS, port), _Handler)

    def server_bind(self) -> None:
        """Without asking the network for this machine's name, as an HTTPServer does."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = ADDRESS, self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self._free.acquire(blocking=False):  # or threads would pile up
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:
            self._free.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that hangs up is not worth a word; anything else is."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"
