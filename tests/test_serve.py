"""The served page and who may not have it: other sites, other names, clients that stall."""

import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pages
import pytest

from mssar.lab.report import page as report
from mssar.lab.report import serve
from mssar.lab.report.serve import Server, Source


class Opened:
    """A server in a thread, and what it says to bytes that are sent to it."""

    def __init__(self, server: Server) -> None:
        self.server, self.port = server, server.server_port

    def send(self, text: str | bytes, *, wait: float = 10.0) -> bytes:
        raw = text if isinstance(text, bytes) else text.encode()
        with socket.create_connection((serve.ADDRESS, self.port), wait) as line:
            line.sendall(raw)
            said = b""
            try:
                while piece := line.recv(1 << 16):
                    said += piece
            except ConnectionError:  # what was sent and not read
                pass
        return said

    def ask(
        self, path: str = "/", method: str = "GET", host: str | None = "", **more: str
    ) -> tuple[int, dict[str, str], str]:
        lines = [f"{method} {path} HTTP/1.1"]
        if host is not None:
            lines.append(f"Host: {host or f'localhost:{self.port}'}")
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in more.items()]
        head, _, body = self.send("\r\n".join(lines) + "\r\n\r\n").partition(b"\r\n\r\n")
        status, *headers = head.decode().split("\r\n")
        named = (line.partition(": ") for line in headers)
        return int(status.split()[1]), {name: value for name, _, value in named}, body.decode()

    def status(self, *path: str, **how: str | None) -> int:
        return self.ask(*path, **how)[0]  # type: ignore[arg-type]


@pytest.fixture
def opened() -> Iterator[Opened]:
    with Server(Source([], lambda: pages.replace(pages.demo(), live=True))) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield Opened(server)
        server.shutdown()
        thread.join()


@pytest.mark.parametrize(
    "host",
    ["localhost", "LocalHost", "127.0.0.1", "127.0.0.1:80", "localhost:9", "LOCALHOST:65535"],
)
def test_names_of_this_machine_are_answered(opened, host):
    assert opened.status("/", host=host) == 200


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "evil.example:80", "127.0.0.1.evil.example:80", "localhost.evil.example"),
        *("localhost.", "0.0.0.0:80", "[::1]:80", "::1", "2130706433", "127.1", "0x7f.1:80"),
        *("localhost:", "localhost:x", "localhost:123456", "localhost:80:80", "user@localhost"),
        *(
            "evil.example:localhost",
            "localhost evil.example",
            "localhost,evil",
            ":80",
            "ｌocalhost",
        ),
        "localhost:٣",
    ],
)
def test_other_names_are_not(opened, host):
    """A name that was made to point here would let its pages read ours."""
    status, _, body = opened.ask(host=host)
    assert (status, body) == (403, "403 this page is for this machine alone\n")


def test_one_name_is_needed_and_no_more(opened):
    assert opened.status(host=None) == 403
    assert opened.status(host="localhost\r\nHost: evil.example") == 403
    assert opened.status(host="evil.example\r\nHost: localhost") == 403
    assert opened.send("GET / HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.0 403 ")
    whole = opened.ask("http://localhost/", host="localhost")  # as to a proxy, which it is not
    assert whole[0] == 404


def test_another_site_may_link_to_the_page_and_nothing_else(opened):
    for site, mode, path, status in (
        ("same-origin", "cors", "/data.json", 200),
        ("none", "navigate", "/", 200),
        ("none", "navigate", "/data.json", 200),
        ("cross-site", "navigate", "/", 200),
        ("same-site", "navigate", "/", 200),  # another port
        ("cross-site", "navigate", "/data.json", 403),
        ("cross-site", "no-cors", "/", 403),
        ("same-site", "cors", "/data.json", 403),
        ("same-site", "no-cors", "/data.json", 403),
        ("nonsense", "cors", "/data.json", 403),
    ):
        asked = opened.status(path, Sec_Fetch_Site=site, Sec_Fetch_Mode=mode)
        assert (site, mode, path, asked) == (site, mode, path, status)
    own = f"localhost:{opened.port}"
    assert opened.status("/data.json", host=own, Origin=f"http://{own}") == 200
    for origin in ("null", "http://localhost:1", f"https://{own}", "https://evil.example", ""):
        assert opened.status("/data.json", host=own, Origin=origin) == 403


@pytest.mark.parametrize(
    "path",
    [
        *("/../pyproject.toml", "//etc/passwd", "/etc/passwd", "/%2e%2e/x", "/.", "/records"),
        *("/data.json/", "/data.jsonl", "/\\..\\x", "/data.json%00", "*", "data.json", "/;/"),
        *(
            "/report.html",
            "/assets/page.js",
            "/favicon.ico",
            "/%2fetc%2fpasswd",
            "?",
            "/data%2ejson",
        ),
    ],
)
def test_there_are_two_paths_and_no_more(opened, path):
    status, headers, body = opened.ask(path)
    assert (status, body) == (404, "404 Not Found\n")
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; sandbox")
    assert headers["Content-Type"] == "text/plain; charset=utf-8"


def test_every_answer_is_protected(opened):
    answers = {
        "page": opened.ask(),
        "news": opened.ask("/data.json"),
        "head": opened.ask(method="HEAD"),
        "lost": opened.ask("/nothing"),
        "refused": opened.ask(host="evil.example"),
        "method": opened.ask(method="POST"),
        "same": opened.ask(If_None_Match=opened.ask()[1]["ETag"]),
    }
    assert [status for status, *_ in answers.values()] == [200, 200, 200, 404, 403, 501, 304]
    for status, headers, _ in answers.values():
        assert serve.PROTECTION.items() <= headers.items(), status
        assert headers["Server"] == "mssar"  # and no versions
        assert headers["Content-Security-Policy"].endswith("; frame-ancestors 'none'")
        assert "unsafe" not in headers["Content-Security-Policy"]
        assert not any(name.startswith("Access-Control") for name in headers)
    assert serve.PROTECTION["X-Content-Type-Options"] == "nosniff"
    assert serve.PROTECTION["X-Frame-Options"] == "DENY"
    assert serve.PROTECTION["Cross-Origin-Resource-Policy"] == "same-origin"


def test_the_header_says_what_the_page_says_of_itself(opened):
    _, headers, body = opened.ask()
    (inside,) = re.findall(r'Content-Security-Policy" content="(.*?)"', body)
    assert headers["Content-Security-Policy"] == f"{inside}; frame-ancestors 'none'"
    assert "script-src 'sha256-" in inside
    assert "connect-src 'self'" in inside


def test_a_head_is_a_page_without_its_body(opened):
    status, headers, body = opened.ask()
    head = opened.ask(method="HEAD")
    assert head[::2] == (status, "")
    assert {n: v for n, v in head[1].items() if n != "Date"} == {
        n: v for n, v in headers.items() if n != "Date"
    }
    assert int(headers["Content-Length"]) == len(body.encode())


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT", "get"])
def test_nothing_can_be_done_to_it(opened, method):
    status, _, body = opened.ask(method=method, Content_Length="3")
    assert status == 501
    assert "<" not in body


@pytest.mark.parametrize(
    "request_",
    [
        f"GET /{'a' * (1 << 17)} HTTP/1.1\r\nHost: localhost\r\n\r\n",
        f"GET / HTTP/1.1\r\nHost: localhost\r\nCookie: {'a' * (1 << 17)}\r\n\r\n",
        "GET / HTTP/1.1\r\n" + "Host: localhost\r\n" * 5000 + "\r\n",
        "A" * (1 << 17),
    ],
    ids=["path", "header", "headers", "line"],
)
def test_large_requests_are_not_read(opened, request_):
    said = opened.send(request_)
    assert said == b"" or said.startswith(b"HTTP/1.0 431 ")
    assert opened.status() == 200


def test_a_request_without_an_end_is_not_waited_for(opened, monkeypatch):
    monkeypatch.setattr(serve, "READING", 60.0)
    said = opened.send("GET / HTTP/1.1\r\nCookie: " + "a" * (serve.HEAD + 100), wait=20)
    assert said.startswith(b"HTTP/1.0 431 ")


@pytest.mark.parametrize(
    "raw",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET / SPDY/1\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\n bent: 1\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n",  # TLS
        b"GET / HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
        b"GET /<script> HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_nonsense_gets_no_page(opened, raw, capfd):
    said = opened.send(raw)
    assert b"<" not in said
    assert opened.status() == 200
    assert capfd.readouterr().err == ""  # nor a traceback in the terminal


def test_half_a_request_is_none(opened):
    with socket.create_connection((serve.ADDRESS, opened.port), 10) as line:
        line.sendall(f"GET / HTTP/1.1\r\nHost: localhost:{opened.port}\r\n".encode())
        line.shutdown(socket.SHUT_WR)
        assert line.recv(100) == b""


def test_clients_that_stall_are_left_and_hold_up_nobody(opened, monkeypatch):
    monkeypatch.setattr(serve, "READING", 1.5)
    with ExitStack() as stack:
        lines = [
            stack.enter_context(socket.create_connection((serve.ADDRESS, opened.port), 10))
            for _ in range(8)
        ]
        begun = time.monotonic()
        assert opened.status() == 200
        for line in lines:  # they are there still
            line.settimeout(0)
            with pytest.raises(BlockingIOError):
                line.recv(1)
            line.settimeout(10)
        # One that says a little at a time has no more time than the others.
        lines[0].settimeout(0.1)
        gone = False
        while not gone and time.monotonic() - begun < 20:
            try:
                lines[0].sendall(b"G")
                gone = lines[0].recv(1) == b""
            except TimeoutError:
                continue
            except ConnectionError:
                gone = True
        assert gone
        assert all(line.recv(1) == b"" for line in lines[1:])
    assert opened.status() == 200


def test_no_more_are_served_at_once_than_there_is_room_for(opened, monkeypatch):
    monkeypatch.setattr(serve, "READING", 60.0)
    before = threading.active_count()
    with ExitStack() as stack:
        for _ in range(serve.AT_ONCE):
            line = socket.create_connection((serve.ADDRESS, opened.port), 10)
            stack.enter_context(line)
        until(lambda: threading.active_count() == before + serve.AT_ONCE)
        assert opened.send("GET / HTTP/1.1\r\n\r\n") == b""
        assert threading.active_count() <= before + serve.AT_ONCE
    until(lambda: opened.send("GET / HTTP/1.1\r\nHost: localhost\r\n\r\n") != b"")


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_listens_to_this_machine_and_asks_for_no_name(monkeypatch):
    def asked(*_: object) -> None:
        raise AssertionError("a name was looked up")

    for name in ("getfqdn", "gethostbyaddr", "gethostname", "getaddrinfo"):
        monkeypatch.setattr(socket, name, asked)
    with Server(Source([], pages.demo)) as server:
        assert server.server_address[0] == "127.0.0.1"
        assert server.socket.family == socket.AF_INET
        assert server.url == f"http://127.0.0.1:{server.server_port}/"


@pytest.mark.browser
@pytest.mark.parametrize("of", [pages.reproduction, pages.demo, pages.comparison])
def test_the_page_works_under_its_policy(show, of):
    """Drawn, themed and fed by what the server sends, with nothing said in the console."""
    current = [pages.replace(of(), live=True)]
    count = [0]

    def make():
        count[0] += 1
        return current[0]

    class Changing(Source):
        def _look(self) -> None:
            self._state = None
            made = self.make()
            self._page, self._news = report.html(made), report.news(made)

    with Server(Changing([], make)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            tab = show(server.url, before=lambda tab: tab.clock.install())
            assert tab.locator("h1").inner_text() == of().title
            if of().curves:
                assert tab.locator("#curves-chart svg path").count() > 5
            before = count[0]
            current[0] = pages.replace(current[0], findings=("Something `new`.",))
            tab.clock.fast_forward(3100)
            tab.locator("#findings", has_text="Something new.").wait_for()
            assert count[0] > before
            assert tab.locator("#findings code").count() == 1
        finally:
            server.shutdown()
            thread.join()
