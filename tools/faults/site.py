"""A site that has one file, knows ranges, and takes its time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

PIECE, PAUSE = 4096, 0.002  # bytes, and seconds between them


@contextmanager
def serving(content: bytes) -> Iterator[str]:
    """Its address, for as long as it serves."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers["Range"]
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206 if asked else 200)
            if asked:
                last = len(content) - 1
                self.send_header("Content-Range", f"bytes {start}-{last}/{last + 1}")
            self.send_header("Content-Length", str(len(content) - start))
            self.end_headers()
            with suppress(ConnectionError):
                for at in range(start, len(content), PIECE):
                    self.wfile.write(content[at : at + PIECE])
                    time.sleep(PAUSE)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/cifar-10-binary.tar.gz"
        finally:
            server.shutdown()
            thread.join()
