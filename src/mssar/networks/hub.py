"""The Hugging Face Hub: asked without noise, and what hinders it in one line."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from mssar.extras import advice

LONGEST = 300  # characters of somebody else's message
WORD = 60  # of a word; a longer one is cut itself
# Of a host that is not there, or does not answer; those of other modules are known by name.
UNREACHED = (ConnectionError, TimeoutError)
NAMES = (
    *("gaierror", "SSLError", "SSLCertVerificationError"),
    *("ConnectError", "ConnectTimeout", "ConnectionError", "ProxyError", "ReadTimeout"),
)
UNREACHABLE = "no connection"  # what is said of them


def needed(name: str, verb: str) -> Any:
    """A package of the extra, or one line that says how to get it."""
    try:
        return import_module(name)
    except ImportError:
        package = name.split(".")[0]
        raise ValueError(f"{verb} needs {package}: {advice('hub')}") from None


@contextmanager
def quiet() -> Iterator[None]:
    """Without its warnings: it tells of every retry, in two lines each."""
    logger = logging.getLogger("huggingface_hub")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def trouble(error: BaseException) -> str:
    """What went wrong, in one line: where nothing was reached, what is at the bottom of it."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) and cause not in chain:
        chain.append(cause)
    for one in reversed(chain):
        if isinstance(one, UNREACHED) or type(one).__name__ in NAMES:
            return f"{UNREACHABLE} ({line(one)})"
    return line(error)


def line(error: BaseException) -> str:
    """An exception's message in one line, which says so where it is cut."""
    said = " ".join(str(error).split()) or type(error).__name__
    if len(said) <= LONGEST:
        return said
    last = said.rfind(" ", 0, LONGEST + 1)
    return f"{said[:LONGEST]}…" if last < LONGEST - WORD else f"{said[:last]} …"
