"""A site for downloads that can misbehave, and what a download leaves."""

import contextlib
import errno
import hashlib
import os
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from cifar_files import Sample, standing_in, tar

from mssar.lab.data import fetch
from mssar.lab.data.fetch import Source


class Site:
    """A server of one file, that can fail in several ways."""

    def __init__(self, content: bytes) -> None:
        self.content = content
        self.ranges = True  # whether it knows them
        self.breaks: list[int] = []  # after how many bytes to break off, a request each
        self.stalls: list[float] = []  # how many seconds to wait, a request each
        self.statuses: list[int] = []  # what to answer instead, a request each
        self.moved: list[str] = []  # where to send a request instead
        self.shift = 0  # how far off the range is that it sends
        self.length = True  # whether it says how much there is
        self.requests: list[str | None] = []  # what range each asked for
        self.sent = 0

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers["Range"]
        self.requests.append(asked)
        if self.stalls:
            time.sleep(self.stalls.pop(0))
        start = int(asked[len("bytes=") : -1]) if asked and self.ranges else 0
        if self.moved:
            request.send_response(302)
            request.send_header("Location", self.moved.pop(0))
            request.end_headers()
            return
        if self.statuses or start >= len(self.content):
            request.send_error(self.statuses.pop(0) if self.statuses else 416)
            return
        if asked and self.ranges:
            start += self.shift
            request.send_response(206)
            last = len(self.content) - 1
            request.send_header("Content-Range", f"bytes {start}-{last}/{last + 1}")
        else:
            request.send_response(200)
        body = self.content[start:]
        if self.length:
            request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        body = body[: self.breaks.pop(0)] if self.breaks else body
        self.sent += len(body)
        request.wfile.write(body)


@contextlib.contextmanager
def serving(site: Site, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            with contextlib.suppress(ConnectionError):
                site.answer(self)

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that does not like the certificate hangs up."""

    with Quiet(("127.0.0.1", 0), Handler) as server:
        if tls:
            server.socket = tls.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http{'s' * bool(tls)}://127.0.0.1:{server.server_port}/files/cifar-10-binary.tar.gz"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(autouse=True)
def _here_and_at_once(monkeypatch, tmp_path):
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.setenv("PATH", str(tmp_path / "no programs"))
    monkeypatch.setattr(fetch, "PAUSES", (0.0, 0.0))
    monkeypatch.setattr(fetch, "PIECE", 1000)
    monkeypatch.setattr(fetch, "SOURCES", {})  # nothing reaches the real site
    monkeypatch.setattr(fetch, "SCHEMES", ("https", "http"))


@pytest.fixture
def sample(monkeypatch):
    return standing_in("cifar10", monkeypatch)


def archive(sample: Sample) -> bytes:
    folder = sample.layout.forms[0].folder
    extra = {f"{folder}/readme.html": b"read me"}
    return tar(extra | {f"{folder}/{file}": c for file, c in sample.binary().items()})


def offer(monkeypatch: pytest.MonkeyPatch, url: str, content: bytes, name: str = "cifar10") -> None:
    monkeypatch.setitem(fetch.SOURCES, name, Source(url, hashlib.sha256(content).hexdigest()))


@pytest.fixture
def site(sample, monkeypatch):
    made = Site(archive(sample))
    with serving(made) as url:
        offer(monkeypatch, url, made.content)
        yield made


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data"


FOLDER = "cifar-10-batches-bin"
PART = "cifar-10-binary.tar.gz.part"


def left(root: Path) -> set[str]:
    """What is in the folder, but for the lock."""
    return {path.name for path in root.iterdir()} - {".cifar10.lock"}


def assert_whole(root: Path, sample: Sample) -> None:
    assert left(root) == {FOLDER}
    contents = {file.name: file.read_bytes() for file in (root / FOLDER).iterdir()}
    assert contents == sample.binary()


def fill_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """The fourth file that is written does not fit."""
    written, write = [], Path.write_bytes

    def full(self: Path, content: bytes) -> int:
        written.append(self)
        if len(written) < 4:
            return write(self, content)
        write(self, memoryview(content)[:100])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)


def nowhere() -> str:
    """The address of a port where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/cifar.tar.gz"
