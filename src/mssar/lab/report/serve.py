"""The page on this machine's own address, looking again whenever a file changes."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from mssar.lab.report.collect import below
from mssar.lab.report.content import Page
from mssar.lab.report.page import html, news

ADDRESS = "127.0.0.1"


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

    def do_GET(self) -> None:
        with suppress(ConnectionError):  # a tab that was closed
            self._answer()

    do_HEAD = do_GET  # noqa: N815, its name there

    def _answer(self) -> None:
        if not self._is_for_us():
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine alone")
            return
        path = self.path.partition("?")[0]
        kinds = {
            "/": ("text/html; charset=utf-8", self.server.source.page),
            "/data.json": ("application/json", self.server.source.news),
        }
        if path not in kinds:
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        kind, make = kinds[path]
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
        self.send_header("Cache-Control", "no-cache")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _is_for_us(self) -> bool:
        """Not a page elsewhere whose name was made to point here."""
        host = self.headers.get("Host", "").rpartition(":")[0]
        return host in (ADDRESS, "localhost")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002, its name there
        """Requests are not news."""


class Server(ThreadingHTTPServer):
    """Serves one page until it is shut down."""

    daemon_threads = True

    def __init__(self, source: Source, port: int = 0) -> None:
        self.source = source
        super().__init__((ADDRESS, port), _Handler)

    def handle_error(self, request: object, client_address: object) -> None:
        """A browser that hangs up is not worth a word; anything else is."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    @property
    def url(self) -> str:
        return f"http://{ADDRESS}:{self.server_address[1]}/"
